package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// TOSFilter reads the TOS byte of IPv4 packets that a dialled TCP socket receives. The kernel shows it of accepted
// sockets alone (IP_PKTOPTIONS). A socket filter that drops nothing writes it into a map, by the socket's cookie.
type TOSFilter struct {
	program *ebpf.Program
	seen    *ebpf.Map
}

// tosEntries bounds the sockets at a time with a TOS byte that Detach has not read yet.
const tosEntries = 1024

// OpenTOSFilter loads the filter. It needs CAP_BPF, which may be dropped afterwards.
func OpenTOSFilter() (*TOSFilter, error) {
	seen, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "penstock_tos", Type: ebpf.LRUHash, KeySize: 8, ValueSize: 1, MaxEntries: tosEntries,
	})
	if err != nil {
		return nil, fmt.Errorf("bpf: map of TOS bytes: %w", err)
	}
	const (
		networkHeader = 1 // BPF_HDR_START_NET
		tosOffset     = 1
		key, value    = -8, -16 // on the stack
	)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "penstock_tos", Type: ebpf.SocketFilter, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.FnGetSocketCookie.Call(),
			asm.StoreMem(asm.RFP, key, asm.R0, asm.DWord),
			asm.Mov.Imm(asm.R1, 0),
			asm.StoreMem(asm.RFP, value, asm.R1, asm.DWord),
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.Mov.Imm(asm.R2, tosOffset),
			asm.Mov.Reg(asm.R3, asm.RFP),
			asm.Add.Imm(asm.R3, value),
			asm.Mov.Imm(asm.R4, 1),
			asm.Mov.Imm(asm.R5, networkHeader),
			asm.FnSkbLoadBytesRelative.Call(),
			asm.JNE.Imm(asm.R0, 0, "accept"),
			asm.LoadMapPtr(asm.R1, seen.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, key),
			asm.Mov.Reg(asm.R3, asm.RFP),
			asm.Add.Imm(asm.R3, value),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnMapUpdateElem.Call(),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("accept"), // the whole packet
			asm.Return(),
		},
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("bpf: filter that reads TOS bytes: %w", err), seen.Close())
	}
	return &TOSFilter{program, seen}, nil
}

// Attach has the filter look at what a socket receives. Call it before the socket connects.
func (f *TOSFilter) Attach(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, f.program.FD()); err != nil {
		return fmt.Errorf("bpf: attach the filter that reads TOS bytes: %w", err)
	}
	return nil
}

// Detach takes the filter off a socket, and returns the TOS byte that came last.
func (f *TOSFilter) Detach(fd int) (tos uint8, err error) {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_BPF, 0); err != nil {
		return 0, fmt.Errorf("bpf: detach the filter that reads TOS bytes: %w", err)
	}
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("bpf: SO_COOKIE: %w", err)
	}
	key := binary.NativeEndian.AppendUint64(nil, cookie)
	err = f.seen.LookupAndDelete(key, &tos)
	if errors.Is(err, ebpf.ErrNotSupported) { // LRU maps have it since Linux 5.14
		err = errors.Join(f.seen.Lookup(key, &tos), f.seen.Delete(key))
	}
	if err != nil {
		return 0, fmt.Errorf("bpf: read the TOS byte of a socket: %w", err)
	}
	return tos, nil
}

// Close frees the filter. Sockets that have it keep it.
func (f *TOSFilter) Close() error { return errors.Join(f.program.Close(), f.seen.Close()) }
