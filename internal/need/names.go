package need

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
)

// LoopbackName is a name with two addresses, 127.0.0.1 and ::1, once ResolveLoopbackName has been called.
const LoopbackName = "loopback.test"

// ResolveLoopbackName has this process resolve LoopbackName, and no other name but those of /etc/hosts. Tests that
// dial a name do not depend on the machine's resolver then, nor on its having "localhost". A TestMain calls it,
// because it replaces net.DefaultResolver.
func ResolveLoopbackName() {
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		near, far := net.Pipe()
		go func() {
			defer far.Close()
			for answerQuery(far) == nil {
			}
		}()
		return near, nil
	}}
}

// answerQuery reads one DNS query in TCP's framing, which the resolver uses on a stream, and answers it.
func answerQuery(c net.Conn) error {
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return err
	}
	query := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(c, query); err != nil {
		return err
	}
	var m dnsmessage.Message
	if err := m.Unpack(query); err != nil {
		return err
	}
	m.Response, m.Additionals = true, nil
	for _, q := range m.Questions {
		header := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET}
		switch {
		case !strings.EqualFold(q.Name.String(), LoopbackName+"."):
			m.RCode = dnsmessage.RCodeNameError
		case q.Type == dnsmessage.TypeA:
			body := &dnsmessage.AResource{A: [4]byte{127, 0, 0, 1}}
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: header, Body: body})
		case q.Type == dnsmessage.TypeAAAA:
			body := &dnsmessage.AAAAResource{AAAA: [16]byte{15: 1}}
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: header, Body: body})
		}
	}
	answer, err := m.AppendPack(make([]byte, 2))
	if err != nil {
		return err
	}
	binary.BigEndian.PutUint16(answer, uint16(len(answer)-2)) //nolint:gosec // an answer has two addresses
	_, err = c.Write(answer)
	return err
}
