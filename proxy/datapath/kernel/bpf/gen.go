package bpf

// The same compiler makes the same objects; CI rebuilds and compares them.
//
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -output-dir=$BPF_OUTPUT -no-global-types -type applied -type seen -type cell -type binding control control.bpf.c -- -O2 -Wall -Wextra -Wno-unused-parameter -Werror -mcpu=v3 -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
