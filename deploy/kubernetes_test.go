package deploy_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
)

// manifest is what the tests look at in an object of Kubernetes.
type manifest struct {
	Kind     string
	Metadata struct{ Name string }
	Data     map[string]string
	Spec     struct {
		UpdateStrategy struct {
			RollingUpdate struct {
				MaxSurge int `yaml:"maxSurge"`
			} `yaml:"rollingUpdate"`
		} `yaml:"updateStrategy"`
		Template struct {
			Spec struct {
				TerminationGracePeriodSeconds int `yaml:"terminationGracePeriodSeconds"`
				Containers                    []struct {
					Args           []string
					Ports          []struct{ Name string }
					ReadinessProbe probe `yaml:"readinessProbe"`
					LivenessProbe  probe `yaml:"livenessProbe"`
					VolumeMounts   []struct {
						SubPath string `yaml:"subPath"`
					} `yaml:"volumeMounts"`
				}
			}
		}
	}
}

type probe struct {
	TimeoutSeconds int                   `yaml:"timeoutSeconds"`
	HTTPGet        struct{ Path string } `yaml:"httpGet"`
}

func manifests(t *testing.T, path string) (out []manifest) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	for dec := yaml.NewDecoder(f); ; {
		var m manifest
		err := dec.Decode(&m)
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(t, err)
		out = append(out, m)
	}
}

func TestManifestsHaveValidConfigurations(t *testing.T) {
	for _, name := range []string{"proxy", "gateway", "edge"} {
		t.Run(name, func(t *testing.T) {
			var cfg config.Config
			workloads := 0
			for _, m := range manifests(t, filepath.Join("kubernetes", name+".yaml")) {
				if m.Kind == "ConfigMap" {
					dir := t.TempDir()
					text := strings.ReplaceAll(m.Data["penstock.yaml"], "/run/secrets/penstock", dir)
					for file, content := range map[string]string{
						"penstock.yaml": text, "peers.conf": "", "vpn.key": "EEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE=\n",
					} {
						require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(content), 0o600))
					}
					var err error
					cfg, err = config.Load(filepath.Join(dir, "penstock.yaml"))
					require.NoError(t, err)
				}
				if m.Kind != "Deployment" && m.Kind != "DaemonSet" {
					continue
				}
				workloads++
				pod := m.Spec.Template.Spec
				wait := cfg.Shutdown.Delay + cfg.Shutdown.Drain
				assert.Greater(t, time.Duration(pod.TerminationGracePeriodSeconds)*time.Second, wait,
					"it would be killed while it drains")
				assert.NotEqual(t, "off", cfg.Telemetry.Health, "what probes ask")
				require.Len(t, pod.Containers, 1)
				assert.Contains(t, pod.Containers[0].Args, "--watch")
				if name == "edge" { // the new pod of a node takes over
					assert.Contains(t, pod.Containers[0].Args, "--takeover")
					assert.Equal(t, 1, m.Spec.UpdateStrategy.RollingUpdate.MaxSurge)
					assert.Empty(t, pod.Containers[0].Ports, "the new pod would wait for the old one's to be free")
				}
				assert.Equal(t, "/readyz", pod.Containers[0].ReadinessProbe.HTTPGet.Path)
				assert.Equal(t, "/healthz", pod.Containers[0].LivenessProbe.HTTPGet.Path)
				for _, p := range []probe{pod.Containers[0].ReadinessProbe, pod.Containers[0].LivenessProbe} {
					assert.GreaterOrEqual(t, p.TimeoutSeconds, 5, "on a busy node the default of a second ends the pod")
				}
				for _, v := range pod.Containers[0].VolumeMounts {
					assert.Empty(t, v.SubPath, "Kubernetes never changes a file that is mounted by one")
				}
			}
			assert.Equal(t, 1, workloads)
		})
	}
}
