package ccp

// DefaultSocket is where agents built on portus listen; it cannot be changed there.
const DefaultSocket = "/tmp/ccp/portus"

// Upward in front of an absolute path leads to the same file, even with /tmp/ccp/ before it, which
// agents of portus up to 0.6 add to the address that they answer.
const Upward = "/../.."

// MaxReply bounds the path of the socket that agents answer, in bytes. The socket's address (sun_path)
// also has Upward and a final zero.
const MaxReply = 107 - len(Upward)
