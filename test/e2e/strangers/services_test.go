//go:build linux

package strangers

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/certs"
)

// nginx serves the scene's directory on ports 80 and, over TLS, 443.
func (s *scene) nginx(program string) {
	s.t.Helper()
	certificate, key := certs.PEM(certs.SelfSigned("files.example"))
	s.write("cert.pem", certificate)
	s.write("key.pem", key)
	s.serve(s.Server, 443, program, "-p", s.dir, "-e", "stderr", "-c", s.write("nginx.conf", fmt.Sprintf(
		"daemon off; user root; pid %[1]s/nginx.pid; error_log stderr;\nevents {}\nhttp { access_log off; server {\n"+
			"listen %[2]v:80; listen %[2]v:443 ssl http2; server_name files.example;\n"+
			"ssl_certificate %[1]s/cert.pem; ssl_certificate_key %[1]s/key.pem;\n"+
			"client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi;\n"+
			"uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi; root %[1]s; client_max_body_size 0;\n"+
			"location /put/ { dav_methods PUT; }\n} }\n", s.dir, s.ServerAddr.V4)))
}

func TestNginx(t *testing.T) {
	is := find(t, "nginx", "curl")
	s := captured(t, 80, 443)
	file := s.file("file", 1, size)
	require.NoError(t, os.MkdirAll(s.dir+"/put", 0o755)) //nolint:gosec // the server's
	s.nginx(is["nginx"])
	curl := func(args ...string) string {
		t.Helper()
		return s.run(nil, is["curl"], append([]string{
			"-sS", "--fail", "--noproxy", "*", "--cacert", s.dir + "/cert.pem",
			"--resolve", fmt.Sprintf("files.example:443:%v", s.ServerAddr.V4),
		}, args...)...)
	}
	plain := fmt.Sprintf("http://%v/", s.ServerAddr.V4)
	curl("-o", s.dir+"/got", plain+"file")
	s.same(file, s.dir+"/got")
	curl("--http2", "-o", s.dir+"/secret", "https://files.example/file")
	s.same(file, s.dir+"/secret")
	curl("-T", file, plain+"put/file")
	s.same(file, s.dir+"/put/file")
	whole, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, hash(whole[1000:2*megabyte]), hash([]byte(curl("-r", "1000-2097151", plain+"file"))), "a range")
	s.carried(4)
}

func TestRedis(t *testing.T) {
	is := find(t, "redis-server", "redis-cli")
	s := captured(t, 6379)
	file := s.file("file", 1, size)
	s.serve(s.Server, 6379, is["redis-server"], "--bind", s.ServerAddr.V4.String(), "--save", "",
		"--protected-mode", "no")
	cli := func(stdin io.Reader, args ...string) string {
		t.Helper()
		return s.run(stdin, is["redis-cli"], append([]string{"-h", s.ServerAddr.V4.String()}, args...)...)
	}
	in, err := os.Open(file)
	require.NoError(t, err)
	defer in.Close()
	assert.Equal(t, "OK\n", cli(in, "-x", "SET", "file"))
	got := cli(nil, "--raw", "GET", "file")
	assert.Equal(t, sumOf(t, file), hash([]byte(strings.TrimSuffix(got, "\n"))))

	const commands = 20_000 // in a pipeline
	var pipe bytes.Buffer
	for range commands {
		pipe.WriteString("INCR counter\r\n")
	}
	assert.Contains(t, cli(&pipe, "--pipe"), fmt.Sprintf("errors: 0, replies: %d", commands))
	assert.Equal(t, fmt.Sprintf("%d\n", commands), cli(nil, "--raw", "GET", "counter"))
	s.carried(4)
}

func TestPostgreSQL(t *testing.T) {
	is := find(t, "psql", "initdb", "postgres", "setpriv")
	s := captured(t, 5432)
	data := filepath.Join(s.dir, "data")
	require.NoError(t, os.Mkdir(data, 0o700))
	require.NoError(t, os.Chown(data, nobody, nobody))
	user := []string{fmt.Sprintf("--reuid=%d", nobody), fmt.Sprintf("--regid=%d", nobody), "--clear-groups"}
	s.run(nil, is["setpriv"], append(user, is["initdb"], "-A", "trust", "-U", "ann", "-N", "-D", data)...)
	access, err := os.OpenFile(filepath.Join(data, "pg_hba.conf"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = fmt.Fprintln(access, "host all all 10.77.0.0/16 trust")
	require.NoError(t, err)
	require.NoError(t, access.Close())
	s.serve(s.Server, 5432, is["setpriv"], append(user, is["postgres"], "-D", data, "-k", data,
		"-h", s.ServerAddr.V4.String(), "-F")...)
	psql := func(stdin io.Reader, sql string) string {
		t.Helper()
		return s.run(stdin, is["psql"], "-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1",
			"-h", s.ServerAddr.V4.String(), "-U", "ann", "-d", "postgres", "-c", sql)
	}
	var rows bytes.Buffer
	for i := range 200_000 {
		fmt.Fprintf(&rows, "%d\t%s\n", i, hash([]byte{byte(i), byte(i >> 8), byte(i >> 16)}))
	}
	want := hash(rows.Bytes())
	psql(nil, "CREATE TABLE rows (number int, text text)")
	psql(&rows, "COPY rows FROM STDIN")
	assert.Equal(t, want, hash([]byte(psql(nil, "COPY (SELECT * FROM rows ORDER BY number) TO STDOUT"))))
	assert.Equal(t, "200000\n", psql(nil, "SELECT count(*) FROM rows"))
	s.carried(4)
}

// nobody is the user and group of servers that refuse to be root.
const nobody = 65534

func TestIperf3(t *testing.T) {
	is := find(t, "iperf3")
	s := captured(t, 5201)
	s.serve(s.Server, 5201, is["iperf3"], "-s", "-B", s.ServerAddr.V4.String())
	// The server takes one test at a time, and may not have heard yet that the one before has ended.
	const busy = "the server is busy running a test. try again later"
	for _, flags := range [][]string{nil, {"-R"}, {"-P", "4"}} {
		const bytes = 40 * megabyte
		args := []string{"-J", "-c", s.ServerAddr.V4.String(), "-n", fmt.Sprint(bytes)}
		type result struct {
			Error string
			End   struct {
				Sent     struct{ Bytes float64 } `json:"sum_sent"`
				Received struct{ Bytes float64 } `json:"sum_received"`
			}
		}
		report := result{Error: busy}
		for tries := 0; report.Error == busy && tries < 100; tries++ {
			out := s.run(nil, is["iperf3"], append(args, flags...)...)
			report = result{}
			require.NoError(t, json.Unmarshal([]byte(out), &report))
		}
		assert.Empty(t, report.Error)
		assert.GreaterOrEqual(t, report.End.Sent.Bytes, float64(bytes), flags)
		assert.Positive(t, report.End.Received.Bytes, flags) // a test ends with what was sent
	}
	s.carried(9) // each has a connection for its control
}
