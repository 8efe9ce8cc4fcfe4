package kernel

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// errTransparent names the privilege that IP_TRANSPARENT needs.
var errTransparent = errors.New("transparent addresses need CAP_NET_ADMIN or CAP_NET_RAW")

// guardStream sets the options that keep a stream from being cut unnoticed. It must be called before the first byte
// can come. Accepted sockets inherit the options from the listener.
func guardStream(fd int) error {
	// An urgent byte stays in its place of the stream. Otherwise a second one can drop it.
	if err := eventloop.SetOption(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, int32(1)); err != nil {
		return fmt.Errorf("set SO_OOBINLINE: %w", err)
	}
	// If the process dies, the kernel resets the connection instead of sending a FIN. Conn.Close takes this back.
	if err := setLinger(fd, lingerReset); err != nil {
		return fmt.Errorf("set SO_LINGER: %w", err)
	}
	// Bytes leave as soon as they are written.
	if err := eventloop.SetOption(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, int32(1)); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	return nil
}

// Times in seconds for which a socket lingers once it is closed.
const (
	lingerDeliver = -1 // close returns, and the kernel delivers what is underway
	lingerReset   = 0  // the kernel drops what is underway and sends a RST
)

// setLinger sets how a socket is closed.
func setLinger(fd, seconds int) error {
	l := unix.Linger{Linger: int32(max(seconds, 0))}
	if seconds >= 0 {
		l.Onoff = 1
	}
	return eventloop.SetOption(fd, unix.SOL_SOCKET, unix.SO_LINGER, l)
}

// keepAlive makes the kernel find out that a peer has vanished.
func keepAlive(fd int) error {
	for _, o := range []struct{ level, option, value int }{
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(datapath.KeepAliveIdle / time.Second)},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(datapath.KeepAliveInterval / time.Second)},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, datapath.KeepAliveCount},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.option, o.value); err != nil {
			return fmt.Errorf("set the keep-alive of a connection: %w", err)
		}
	}
	return nil
}

// setTransparent lets a socket use addresses that are not this host's. The LocalAddr of what a transparent listener
// accepts is the client's destination.
func setTransparent(fd int, network string) error {
	// On an IPv6 socket, the IPv4 option covers its IPv4 side.
	err := eventloop.SetOption(fd, unix.SOL_IP, unix.IP_TRANSPARENT, int32(1))
	if strings.HasSuffix(network, "6") {
		err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
	}
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: %w", errTransparent, err)
	}
	return os.NewSyscallError("setsockopt IP_TRANSPARENT", err)
}

// Envelopes returns the congestion controls that this kernel has loaded, and those of them that a process without
// CAP_NET_ADMIN may set.
func Envelopes() (available, allowed []string, err error) {
	if available, err = listControls("available"); err != nil {
		return nil, nil, err
	}
	allowed, err = listControls("allowed")
	return available, allowed, err
}

// listControls returns one of the two lists of congestion controls: "available" or "allowed".
func listControls(which string) ([]string, error) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_" + which + "_congestion_control")
	if err != nil {
		return nil, fmt.Errorf("kernel: list envelopes: %w", err)
	}
	return strings.Fields(string(text)), nil
}

// chooseEnvelope finds the congestion control to set on each socket by setting it on fd, an unconnected one. That also
// loads its module where the kernel allows it. An empty envelope leaves sockets the system's default; why then says
// what to do about it.
func chooseEnvelope(fd int, want string) (envelope, why string) {
	set := func(name string) error { return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name) }
	if want != "" {
		if err := set(want); err != nil {
			return "", envelopeRefused(want, err)
		}
		return want, ""
	}
	err := set("bbr")
	if err == nil {
		return "bbr", ""
	}
	why = envelopeRefused("bbr", err)
	if err := set("cubic"); err != nil {
		return "", why + "; " + envelopeRefused("cubic", err)
	}
	return "cubic", why
}

// envelopeRefused says in words why the kernel did not take an envelope.
func envelopeRefused(name string, err error) string {
	switch {
	case errors.Is(err, unix.ENOENT):
		return fmt.Sprintf("envelope %q: this kernel has not loaded it; run: modprobe tcp_%s", name, name)
	case errors.Is(err, unix.EPERM):
		allowed, _ := listControls("allowed")
		if !slices.Contains(allowed, name) {
			allowed = append(allowed, name)
		}
		return fmt.Sprintf("envelope %q: not permitted; run: sysctl -w net.ipv4.tcp_allowed_congestion_control=%q, "+
			"or grant CAP_NET_ADMIN",
			name, strings.Join(allowed, " "))
	default:
		return fmt.Sprintf("envelope %q: %v", name, err)
	}
}

// envelopeOf returns the congestion control of a socket; empty: unknown.
func envelopeOf(fd int) string {
	name, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	if err != nil {
		return ""
	}
	return strings.TrimRight(name, "\x00")
}

// sockopts are the options of a limit, set in one visit to a socket.
type sockopts struct {
	rate   int64 // bits per second, SO_MAX_PACING_RATE; 0: unlimited; unchanged: left as it is
	unsent int64 // bytes, TCP_NOTSENT_LOWAT; 0: net.ipv4.tcp_notsent_lowat; unchanged: left as it is
	send   bool  // the kernel is to try to send what waits
}

// defaultSockopts are the options that a new socket has.
var defaultSockopts = sockopts{unsent: systemUnsent}

// Values of sockopts, and of the options themselves.
const (
	unchanged    = -1
	systemUnsent = 0            // net.ipv4.tcp_notsent_lowat is in force
	unlimited    = math.MaxUint // SO_MAX_PACING_RATE's "not limited"
)

// setOptions sets what has changed, and returns how many options the socket refused. It makes no system call if
// nothing has changed.
//
// The system calls bypass Go's scheduler. After one that the scheduler knows of, a tick would wait behind all
// goroutines that move bytes, and so would all sockets that it serves. A call lasts at most as long as another thread
// works on the socket.
func (o sockopts) setOptions(raw *eventloop.Socket) (refused uint64) {
	if o.rate == unchanged && o.unsent == unchanged && !o.send {
		return 0
	}
	count := func(err error) {
		if err != nil {
			refused++
		}
	}
	count(raw.Visit(func(fd int) error {
		if o.rate != unchanged {
			count(eventloop.SetOption(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, pacingOption(cc.Rate(o.rate))))
		}
		if o.unsent != unchanged {
			count(eventloop.SetOption(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, int32(o.unsent)))
		}
		if o.send { // guardStream has set it; when it is set again, the kernel sends what the window allows
			count(eventloop.SetOption(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, int32(1)))
		}
		return nil
	}))
	return refused
}

// pacingOption returns SO_MAX_PACING_RATE for a rate, 0 being unlimited: bytes per second, in the kernel's unsigned
// long. A 32-bit kernel takes 4 bytes.
func pacingOption(rate cc.Rate) uint {
	if rate == 0 {
		return unlimited
	}
	return uint(min(bytesPerSecond(rate), unlimited-1))
}

// bytesPerSecond converts a pacing rate. Only a rate of 0, which means unpaced, gives 0.
func bytesPerSecond(rate cc.Rate) uint64 {
	if rate <= 0 {
		return 0
	}
	return uint64(max(1, rate/8))
}

// tcpInfo reads TCP_INFO of a socket and returns how many bytes of it this kernel has.
func tcpInfo(fd int, info *unix.TCPInfo) (uintptr, error) {
	return readOption(fd, unix.IPPROTO_TCP, unix.TCP_INFO, unsafe.Pointer(info), unsafe.Sizeof(*info))
}

// readOption reads an option into memory of room bytes, and returns how many the kernel has written. It bypasses Go's
// scheduler, as setOptions does.
func readOption(fd, level, name int, to unsafe.Pointer, room uintptr) (uintptr, error) {
	size := uint32(room)
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name), uintptr(to),
		uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0, errno
	}
	return uintptr(size), nil
}

// Indices into SO_MEMINFO (include/uapi/linux/sock_diag.h).
const (
	receiveUsed    = 0 // SK_MEMINFO_RMEM_ALLOC
	sendBufferSize = 3 // SK_MEMINFO_SNDBUF
	sendQueued     = 5 // SK_MEMINFO_WMEM_QUEUED
	memoryInfoSize = 9
)

// memoryInfo returns SO_MEMINFO: the kernel's memory for a socket, in bytes with overhead.
func memoryInfo(fd int) (vars [memoryInfoSize]uint32, err error) {
	_, err = readOption(fd, unix.SOL_SOCKET, unix.SO_MEMINFO, unsafe.Pointer(&vars), unsafe.Sizeof(vars))
	return vars, err
}

// enlargeBuffer makes the kernel enlarge a receive buffer for a window of that many bytes, up to half of
// net.ipv4.tcp_rmem's maximum. By itself the kernel does so only when more bytes than ever arrive in a round trip,
// which a small window may prevent. It also makes room for as many bytes as the reader waits for (SO_RCVLOWAT), and
// setting that needs no privilege.
func enlargeBuffer(fd int, window cc.Bytes) error {
	return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, int(window)),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, 1))
}

// setBuffer gives a socket a receive buffer of size bytes, or as much of it as needs no privilege.
func setBuffer(fd int, size cc.Bytes) bool {
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, int(size/2)) == nil // the kernel doubles it
}

// setClamp bounds the window that a socket advertises, in bytes. The kernel raises the bound only together with a
// buffer that it sizes itself.
func setClamp(fd int, clamp cc.Bytes) error {
	return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP, int(clamp))
}

// hasRoom reports whether a socket takes bytes. If it takes none, the question makes the kernel wake the writer once it
// does. hasRoom runs inside RawConn.Write.
func hasRoom(fd uintptr) bool {
	asked := [...]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(asked[:], 0)
	return n > 0 || err != nil // the write then returns the error
}

// hasArrived reports whether there is anything to read.
func hasArrived(fd int) bool {
	n, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	return err == nil && n > 0
}

// atMark reports whether the next byte to be read is the urgent one (tcp(7)). The kernel takes no lock for it, so the
// scheduler need not know.
func atMark(fd uintptr) bool {
	var mark int32
	_, _, errno := unix.RawSyscall(unix.SYS_IOCTL, fd, unix.SIOCATMARK, uintptr(unsafe.Pointer(&mark)))
	return errno == 0 && mark != 0
}

// maxFalseEmpty bounds how often a read in front of an urgent byte is tried again. If a signal is pending, the kernel
// returns EAGAIN there although the byte has come (tcp_recvmsg).
const maxFalseEmpty = 8

// A DSCP is the upper six bits of the TOS byte (IPv4) or of the traffic class (IPv6). On TCP sockets the kernel keeps
// the lower two, which are ECN's, whatever is set.
const dscpShift = 2

// setDSCP sets what the packets of a socket are marked with.
func setDSCP(fd int, is4 bool, dscp uint8) error {
	level, option := unix.IPPROTO_IP, unix.IP_TOS
	if !is4 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
	}
	if err := unix.SetsockoptInt(fd, level, option, int(dscp)<<dscpShift); err != nil {
		return fmt.Errorf("set a DSCP of %d: %w", dscp, err)
	}
	return nil
}

// readReceived returns the DSCP of the received packet that the kernel remembers. On an accepted socket that is the one
// that completed the handshake, on a dialled socket of IPv6 any since IPV6_RECVTCLASS was set. While the option receive
// is on, the option packet returns control messages. The one of type kind has the TOS byte.
func readReceived(fd int, is4 bool) (uint8, error) {
	level, receive, packet, kind := unix.IPPROTO_IP, unix.IP_RECVTOS, unix.IP_PKTOPTIONS, unix.IP_TOS
	if !is4 {
		level, receive, packet, kind = unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, unix.IPV6_2292PKTOPTIONS, unix.IPV6_TCLASS
	}
	if err := unix.SetsockoptInt(fd, level, receive, 1); err != nil {
		return 0, fmt.Errorf("ask for the DSCP of what was received: %w", err)
	}
	var buf [256]byte
	size, err := readOption(fd, level, packet, unsafe.Pointer(&buf), unsafe.Sizeof(buf))
	if err = errors.Join(unix.SetsockoptInt(fd, level, receive, 0), err); err != nil {
		return 0, fmt.Errorf("read the DSCP of what was received: %w", err)
	}
	controls, err := unix.ParseSocketControlMessage(buf[:size])
	if err != nil {
		return 0, fmt.Errorf("read the DSCP of what was received: %w", err)
	}
	for _, c := range controls {
		if int(c.Header.Level) == level && int(c.Header.Type) == kind && len(c.Data) >= int(unsafe.Sizeof(int32(0))) {
			return uint8(*(*int32)(unsafe.Pointer(&c.Data[0]))) >> dscpShift, nil
		}
	}
	return 0, nil
}

// tosReader has the filter that reads the DSCP of what dialled IPv4 sockets receive. It is loaded at the start, before
// the program drops its privileges, because a reload may need it.
type tosReader struct {
	filter *bpf.TOSFilter // nil: it could not be loaded
	err    error          // why not
	warned sync.Once
}

// open loads the filter, or notes why it cannot be loaded.
func (r *tosReader) open() { r.filter, r.err = bpf.OpenTOSFilter() }

// close frees the filter. Sockets that have it keep it.
func (r *tosReader) close() error {
	if r.filter == nil {
		return nil
	}
	return r.filter.Close()
}

// prepareSocket makes the socket remember the DSCP of what comes, for readDSCP. Call it before the socket connects.
func (r *tosReader) prepareSocket(fd int, is4 bool, log *slog.Logger) error {
	if !is4 {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1)
	}
	if r.filter != nil {
		return r.filter.Attach(fd)
	}
	r.warned.Do(func() {
		log.Warn("the DSCP of servers cannot be read over IPv4, so that clients are answered with their own; start "+
			"the program with CAP_BPF", "err", r.err)
	})
	return nil
}

// readDSCP returns the DSCP of what a socket has received since prepareSocket; 0: none, or not known. It undoes
// prepareSocket, which costs time with each packet.
func (r *tosReader) readDSCP(fd int, is4 bool) (uint8, error) {
	if !is4 {
		return readReceived(fd, false)
	}
	if r.filter == nil {
		return 0, nil
	}
	tos, err := r.filter.Detach(fd)
	return tos >> dscpShift, err
}

// scanFile reads the values of a file of /proc, separated by blanks.
func scanFile(path string, to ...any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if _, err = fmt.Sscan(string(text), to...); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
