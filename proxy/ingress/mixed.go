package ingress

import (
	"context"
	"fmt"
)

// serveMixed serves SOCKS5 and what is asked of an HTTP proxy on one port: a SOCKS5 client opens with
// its version, an HTTP client with the first letter of a method.
func (l *greeter) serveMixed(ctx context.Context, in *input, c *Client) error {
	first, err := in.Peek(1)
	if err != nil {
		return fmt.Errorf("mixed: %w", err)
	}
	switch b := first[0]; {
	case b == socksVersion:
		return l.serveSOCKS5(ctx, in, c)
	case b >= 'A' && b <= 'Z', b >= 'a' && b <= 'z':
		return l.serveHTTP(ctx, in, c)
	default:
		return fmt.Errorf("mixed: first byte %#02x is neither SOCKS5 nor HTTP", b)
	}
}
