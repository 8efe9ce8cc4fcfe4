// Package bench measures what senders make of a link: the kernel's congestion
// controls, sending directly, beside Penstock's algorithms, through a real proxy
// process. All figures come from the emulated link's own record; nothing here
// decides anything.
package bench
