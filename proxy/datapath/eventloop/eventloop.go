// Package eventloop serves sockets on one goroutine per processor. It runs a task when the task's sockets may be read
// or written, so that an idle connection needs neither a goroutine nor a stack. It knows nothing of what sockets
// carry.
//
// # Who runs what
//
//	what                                       runs on
//	a Task's function, what Do gets            the loop's goroutine; one at a time
//	a Listener's accept                        the goroutine of a loop that waits for events
//	a Deadline's function                      the loop's goroutine
//	Post, Do                                   any goroutine; they never wait and never run the function themselves
//	Socket.Read, Write without a driver        any goroutine, which waits inside
//	Socket.Read, Write with a driver           the driver's run alone; they return datapath.ErrWait instead of waiting
//	Socket.Close, deadlines, Visit, Control    any goroutine
//	Socket.Writable, Ended, Broken, OnBroken,  the loop's goroutine
//	Emptied, StartDeadline, CancelDeadline
//
// What runs on a loop must not wait: all of the loop's sockets would wait with it.
//
// A loop waits in epoll_pwait(2) itself. Go's poller would ask its own epoll instance and the loop's in turn, and wake
// a second thread for each batch. The loop keeps one of Go's processors while it waits, so New raises GOMAXPROCS for
// it (ReserveProcessors), and Slice.Renew keeps Go's monitor from taking it away. The calls on sockets do not block,
// and do not tell Go's scheduler of themselves.
//
// # Edge-triggered events
//
// A socket is added to epoll once, for reading and writing, and the kernel tells of each change once. So:
//
//   - A side (reading or writing) is ready from an event until a call finds that it is not: EAGAIN, or a read that
//     fills only a part of its buffer (Emptied). Until the next event nothing more can be read.
//   - After the peer's end or an error there is no further event, so reading stays ready (Socket.peerEnded).
//   - A task that has not used up a side is not run again for it. It moves what it can, or posts itself.
//   - Events that came before Drive are not repeated, so the caller of Drive posts the task.
//   - The end of a read in front of an urgent byte looks like an empty socket. Where an urgent byte was announced,
//     Emptied must not be called.
//
// Listening sockets alone are level-triggered, and exclusive: the kernel wakes one of the loops that wait.
package eventloop
