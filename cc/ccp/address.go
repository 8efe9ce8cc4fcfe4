package ccp

// DefaultSocket is where agents built on portus listen; it cannot be changed there.
const DefaultSocket = "/tmp/ccp/portus"

// Upward in front of a whole path leads to the same place, also behind /tmp/ccp/, which
// agents of portus up to 0.6 put before the address that they answer.
const Upward = "/../.."

// MaxReply bounds the path of the socket that agents answer, in bytes: what an address has
// room for with its final zero (sun_path), behind Upward.
const MaxReply = 107 - len(Upward)
