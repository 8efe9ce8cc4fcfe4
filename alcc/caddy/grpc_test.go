package caddy

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/penstock-net/penstock/alcc"
)

// TestGRPCRunsOverTheLibrary has a server and a client of gRPC talk over controlled connections. It is in this module
// because the library's own has no gRPC.
func TestGRPCRunsOverTheLibrary(t *testing.T) {
	for _, opts := range []alcc.Options{{}, {OwnAcks: true}} {
		plain, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		ln, err := alcc.NewListener(plain, opts)
		require.NoError(t, err)
		server := grpc.NewServer()
		state := health.NewServer()
		healthpb.RegisterHealthServer(server, state)
		served := make(chan error, 1)
		go func() { served <- server.Serve(ln) }()

		dialer := alcc.Dialer{Options: opts}
		client, err := grpc.NewClient("passthrough:///"+plain.Addr().String(),
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, at string) (net.Conn, error) {
				return dialer.DialContext(ctx, "tcp", at)
			}))
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		watched, err := healthpb.NewHealthClient(client).Watch(ctx, &healthpb.HealthCheckRequest{})
		require.NoError(t, err)
		for _, want := range []healthpb.HealthCheckResponse_ServingStatus{
			healthpb.HealthCheckResponse_SERVING, healthpb.HealthCheckResponse_NOT_SERVING,
		} {
			state.SetServingStatus("", want)
			answer, err := watched.Recv()
			require.NoError(t, err)
			assert.Equal(t, want, answer.GetStatus())
		}
		cancel()
		require.NoError(t, client.Close())
		server.Stop()
		require.NoError(t, <-served)
	}
}
