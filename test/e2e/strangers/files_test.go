//go:build linux

package strangers

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/labtest"
)

const (
	megabyte = 1 << 20
	size     = 20 * megabyte
)

// sshd starts OpenSSH's server, and returns the options of its clients.
func (s *scene) sshd(is map[string]string) []string {
	s.t.Helper()
	require.NoError(s.t, os.MkdirAll("/run/sshd", 0o755)) //nolint:gosec // as Debian's unit makes it
	host, user := filepath.Join(s.dir, "host"), filepath.Join(s.dir, "user")
	for _, key := range []string{host, user} {
		s.run(nil, is["ssh-keygen"], "-q", "-t", "ed25519", "-N", "", "-f", key)
	}
	s.serve(s.Server, 22, is["sshd"], "-D", "-e", "-f", s.write("sshd_config", fmt.Sprintf(
		"ListenAddress %v\nHostKey %s\nAuthorizedKeysFile %s.pub\nStrictModes no\nUsePAM no\nPidFile none\n"+
			"PermitRootLogin yes\nSubsystem sftp internal-sftp\n", s.ServerAddr.V4, host, user)))
	return []string{
		"-q", "-F", "none", "-i", user, "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no",
		"-o", "UserKnownHostsFile=/dev/null",
	}
}

func (s *scene) root() string { return "root@" + s.ServerAddr.V4.String() }

func TestOpenSSH(t *testing.T) {
	is := find(t, "sshd", "ssh", "ssh-keygen", "scp")
	s := captured(t, 22)
	options := s.sshd(is)
	file := s.file("file", 1, size)
	there, back := filepath.Join(s.dir, "there"), filepath.Join(s.dir, "back")
	s.run(nil, is["scp"], append(options, file, s.root()+":"+there)...)
	s.run(nil, is["scp"], append(options, s.root()+":"+there, back)...)
	s.same(file, there)
	s.same(file, back)
	in, err := os.Open(file)
	require.NoError(t, err)
	defer in.Close()
	assert.Contains(t, s.run(in, is["ssh"], append(options, s.root(), "sha256sum")...), sumOf(t, file))
	s.carried(3)
}

func TestRsync(t *testing.T) {
	is := find(t, "rsync", "sshd", "ssh", "ssh-keygen")
	s := captured(t, 22, 873)
	tree := filepath.Join(s.dir, "tree")
	for i := range 50 {
		s.file(fmt.Sprintf("tree/%d/file", i), byte(i), 200_000)
	}
	equal := func(copied string) {
		t.Helper()
		for i := range 50 {
			s.same(fmt.Sprintf("%s/%d/file", tree, i), fmt.Sprintf("%s/%d/file", copied, i))
		}
	}
	shell := is["ssh"] + " " + strings.Join(s.sshd(is), " ")
	s.run(nil, is["rsync"], "-a", "-z", "-e", shell, tree+"/", s.root()+":"+s.dir+"/overssh/")
	equal(s.dir + "/overssh")

	conf := s.write("rsyncd.conf", fmt.Sprintf(
		"use chroot = no\n[module]\npath = %s\nread only = no\nuid = root\ngid = root\n", s.dir))
	s.serve(s.Server, 873, is["rsync"], "--daemon", "--no-detach", "--config", conf)
	module := "rsync://" + s.ServerAddr.V4.String() + "/module/"
	s.run(nil, is["rsync"], "-a", tree+"/", module+"pushed/")
	equal(s.dir + "/pushed")
	s.run(nil, is["rsync"], "-a", module+"pushed/", s.dir+"/pulled/")
	equal(s.dir + "/pulled")
	s.carried(3)
}

func TestGit(t *testing.T) {
	is := find(t, "git")
	s := captured(t, 9418)
	git := func(args ...string) string {
		own := []string{"-c", "safe.directory=*", "-c", "user.name=ann", "-c", "user.email=ann@example.com"}
		return s.run(nil, is["git"], append(own, args...)...)
	}
	git("init", "-q", "-b", "main", "work")
	for i := range 30 {
		s.file(fmt.Sprintf("work/%d", i), byte(i), 300_000)
	}
	git("-C", "work", "add", ".")
	git("-C", "work", "commit", "-q", "-m", "first")
	git("init", "-q", "--bare", "-b", "main", "served/there.git")
	s.serve(s.Server, 9418, is["git"], "-c", "safe.directory=*", "daemon", "--export-all", "--enable=receive-pack",
		"--reuseaddr", "--base-path="+s.dir+"/served", "--listen="+s.ServerAddr.V4.String())
	remote := "git://" + s.ServerAddr.V4.String() + "/there.git"
	git("-C", "work", "push", "-q", remote, "main")
	git("clone", "-q", remote, "cloned")
	assert.Equal(t, git("-C", "work", "rev-parse", "HEAD"), git("-C", "cloned", "rev-parse", "HEAD"))
	git("-C", "cloned", "fsck", "--full") // which hashes every object
	s.carried(2)
}

// vsftpd starts a server of the directory pub, whose passive ports are 30000 to 30009. It returns a file in pub and a
// directory for uploads.
func (s *scene) vsftpd(program string) (file, incoming string) {
	s.t.Helper()
	file, incoming = s.file("pub/file", 1, size), filepath.Join(s.dir, "pub", "incoming")
	require.NoError(s.t, os.MkdirAll(incoming, 0o755))   //nolint:gosec // the server's user writes there
	require.NoError(s.t, os.Chmod(incoming, 0o777))      //nolint:gosec // as above
	require.NoError(s.t, os.MkdirAll(s.dir+"/e", 0o755)) //nolint:gosec // an empty one that it asks for
	s.serve(s.Server, 21, program, s.write("vsftpd.conf", fmt.Sprintf(
		"listen=YES\nbackground=NO\nlisten_address=%v\nanonymous_enable=YES\nlocal_enable=NO\nwrite_enable=YES\n"+
			"anon_upload_enable=YES\nanon_root=%s/pub\npasv_min_port=30000\npasv_max_port=30009\nsecure_chroot_dir=%[2]s/e\n"+
			"nopriv_user=nobody\nxferlog_enable=NO\nseccomp_sandbox=NO\nanon_umask=022\n",
		s.ServerAddr.V4, s.dir)))
	return file, incoming
}

// TestFTP has a server that opens a port for every transfer, which passive clients
// connect to.
func TestFTP(t *testing.T) {
	is := find(t, "vsftpd", "lftp")
	ports := []uint16{21}
	for p := range uint16(10) {
		ports = append(ports, 30000+p)
	}
	s := captured(t, ports...)
	file, incoming := s.vsftpd(is["vsftpd"])
	s.run(nil, is["lftp"], "-c", fmt.Sprintf("set net:max-retries 1; set net:timeout 20; open ftp://%v; "+
		"get file -o %s/got; put %s -o incoming/put; pget -n 4 file -o %[2]s/parts", s.ServerAddr.V4, s.dir, file))
	s.same(file, s.dir+"/got")
	s.same(file, incoming+"/put")
	s.same(file, s.dir+"/parts")
	s.carried(4)
}

// TestActiveFTP has a server that connects to its client for every transfer, as docs/capture.md says.
func TestActiveFTP(t *testing.T) {
	is := find(t, "vsftpd", "curl")
	for _, c := range []struct {
		name, listener string
		rules          []string
		flows          float64 // 0: the server refuses
	}{
		{"the server sees the edge", "", []string{"-i", "cell0", "--dport", "21"}, 0},
		{"data pass by", ", keep_client: true", []string{"-i", "cell0", "--dport", "21"}, 2},
		{
			"data are captured", ", keep_client: true",
			[]string{"-i", "cell0,wan0", "--dport", "21,40000-40009"},
			4,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := open(t, edge.Options{Listener: `{name: edge, mode: tproxy, address: "[::]:7000"` + c.listener + `}`})
			s.runAt(s.Edge, nil, labtest.Penstock(t),
				append([]string{"rules", "apply", "--port", "7000", "--connected"}, c.rules...)...)
			file, incoming := s.vsftpd(is["vsftpd"])
			server := fmt.Sprintf("ftp://%v/", s.ServerAddr.V4)
			curl := func(args ...string) error {
				_, err := s.attempt(s.Client, nil, is["curl"], append([]string{
					"-sSv", "--noproxy", "*", "--ftp-port", s.ClientAddr.V4.String() + ":40000-40009",
				}, args...)...)
				return err
			}
			err := curl("-o", s.dir+"/got", server+"file")
			if c.flows == 0 {
				require.ErrorContains(t, err, "< 500 Illegal PORT command")
				return
			}
			require.NoError(t, err)
			require.NoError(t, curl("-T", file, server+"incoming/put"))
			s.same(file, s.dir+"/got")
			s.same(file, incoming+"/put")
			assert.InDelta(t, c.flows, s.flows(), 0)
		})
	}
}
