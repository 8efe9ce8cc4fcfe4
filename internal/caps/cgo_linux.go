//go:build cgo

package caps

// usesCgo is set where libcap signals each thread, instead of the Go runtime.
const usesCgo = true
