package kernel

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// atMark says whether the next byte to be read is the urgent one (tcp(7)). The
// kernel takes no lock for it, so the scheduler need not know.
func atMark(fd uintptr) bool {
	var mark int32
	_, _, errno := unix.RawSyscall(unix.SYS_IOCTL, fd, unix.SIOCATMARK, uintptr(unsafe.Pointer(&mark)))
	return errno == 0 && mark != 0
}

// writeUrgent is Write for one byte that is urgent: the receiver's mark is at it.
func (c *Conn) writeUrgent(b []byte) (n int, err error) {
	c.beginWrite()
	defer c.endWrite()
	poll := c.waitWritable()
	if poll == nil {
		poll = c.raw.Write(func(fd uintptr) bool {
			n, err = unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_OOB|unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			return !errors.Is(err, unix.EAGAIN)
		})
		c.noteTaken(n)
	}
	return n, c.opFailure("write", poll, err)
}

// inlet and outlet are the ends of a splicer's copy.
type inlet splicer

func (i *inlet) Read(b []byte) (int, error) { return i.src.Read(b) }

func (i *inlet) ReadReady(room datapath.Room) (n int, err error) {
	if i.drainingPipe {
		i.urgent = false
		return unix.Read(i.pipe.r, room.Take()[:i.pipe.n])
	}
	n, i.urgent, err = i.src.readReady(room, true)
	return n, err
}

type outlet splicer

func (o *outlet) Write(b []byte) (int, error) {
	if o.urgent {
		return o.dst.writeUrgent(b)
	}
	return o.dst.Write(b)
}
