package main

import (
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/cli/clitest"
)

// run executes one command line.
func run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return clitest.Run(t, runCommandLine, args)
}

func TestExitCodes(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		code int
		says string // in standard error
	}{
		"nothing at all prints the help": {nil, cli.ExitOK, ""},
		"help is no error":               {[]string{"algorithms", "--help"}, cli.ExitOK, ""},
		"a file without its flag": {
			[]string{"run", "edge.yaml"},
			cli.ExitInput,
			"penstock run takes no arguments; the file goes behind a flag: penstock run --config edge.yaml",
		},
		"an argument too many": {
			[]string{"schema", "all"},
			cli.ExitInput,
			`takes no arguments, but there is "all"`,
		},
		"an unknown command is bad usage": {[]string{"frobnicate"}, cli.ExitInput, `unknown command "frobnicate"`},
		"a command that is nearly one": {
			[]string{"rnu"},
			cli.ExitInput,
			`unknown command "rnu" for "penstock"; did you mean run?`,
		},
		"another word for a command": {
			[]string{"gateway", "peer", "rm", "phone"},
			cli.ExitInput,
			`unknown command "rm" for "penstock gateway peer"; did you mean remove?`,
		},
		"a command of the laboratory": {
			[]string{"bench"},
			cli.ExitInput,
			`unknown command "bench" for "penstock"; run penstock-lab bench`,
		},
		"a time without its unit": {
			[]string{"run", "--drain", "5"},
			cli.ExitInput,
			`"5" is not a time with a unit, such as 10s`,
		},
		"a flag that is nearly one": {[]string{"doctor", "--cofnig", "f"}, cli.ExitInput, "did you mean --config?"},
		"a port that is none": {
			[]string{"rules", "apply", "--port", "70000"},
			cli.ExitInput,
			`--port: "70000" is not a whole number from 0 to 65535`,
		},
		"a mode that is nearly one": {
			[]string{"rules", "print", "--mode", "tprxy", "--port", "7000"},
			cli.ExitInput,
			`--mode: "tprxy" is not one of tproxy, redirect; did you mean tproxy?`,
		},
		"a question without a question": {
			[]string{"check", "edge.yaml", "--name", "www.example.com"},
			cli.ExitInput,
			"--name is of the connection that --explain is asked about: add --explain CLIENT SERVER, or leave it out",
		},
		"half a question": {
			[]string{"check", "edge.yaml", "--explain", "192.0.2.1"},
			cli.ExitInput,
			"2 arguments do not fit; write: penstock check FILE [--explain CLIENT SERVER]",
		},
		"an unknown flag is bad usage": {[]string{"algorithms", "--frob"}, cli.ExitInput, "unknown flag: --frob"},
		"a flag of other commands": {
			[]string{"--explain"}, cli.ExitInput, "unknown flag: --explain; commands that have it: penstock check",
		},
		"an address to listen on without its host": {
			[]string{"run", "--listen", "1080"}, cli.ExitInput, `--listen: "1080" is not host:port, such as 127.0.0.1:1080`,
		},
		"an address of telemetry without its host": {
			[]string{"run", "--telemetry", "9464"}, cli.ExitInput, `--telemetry: "9464" is not host:port, such as`,
		},
		"an address to ask without its port": {
			[]string{"top", "--once", "--telemetry", "127.0.0.1"},
			cli.ExitInput,
			`--telemetry: "127.0.0.1" is not host:port, such as 127.0.0.1:9464`,
		},
		"too many arguments are bad usage": {
			[]string{"algorithms", "copa", "reno"},
			cli.ExitInput,
			"2 arguments do not fit; write: penstock algorithms [NAME]",
		},
		"an unknown name is bad input": {[]string{"algorithms", "frob"}, cli.ExitInput, `no algorithm "frob"`},
		"a good command succeeds":      {[]string{"algorithms", "copa"}, cli.ExitOK, ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := run(t, c.args...)
			assert.Equal(t, c.code, code)
			if c.says == "" {
				assert.Empty(t, stderr)
				assert.NotEmpty(t, stdout)
				return
			}
			assert.Contains(t, stderr, c.says)
			assert.Empty(t, stdout)
		})
	}
}

func TestClockIsNeverZeroAndNeverGoesBack(t *testing.T) {
	first := monotonicTime()
	assert.Positive(t, first)
	assert.GreaterOrEqual(t, monotonicTime(), first)
}

func TestVersionNamesTheProgram(t *testing.T) {
	code, stdout, _ := run(t, "version")
	require.Equal(t, cli.ExitOK, code)
	for _, flag := range []string{"--version", "-v"} {
		code, same, _ := run(t, flag)
		require.Equal(t, cli.ExitOK, code)
		assert.Equal(t, stdout, same)
	}
	assert.Regexp(t, `^penstock \S+ .*go1\.\d+\S* linux/\w+\n$`, stdout)
}

func TestAlgorithmsListsTheRegistry(t *testing.T) {
	code, stdout, _ := run(t, "algorithms")
	require.Equal(t, cli.ExitOK, code)
	for _, s := range cc.Specs() {
		assert.Regexp(t, `(?m)^`+s.Name+` `, stdout)
	}
}

func TestEveryAlgorithmExplainsItself(t *testing.T) {
	for _, s := range cc.Specs() {
		code, stdout, _ := run(t, "algorithms", s.Name)
		require.Equal(t, cli.ExitOK, code)
		assert.Contains(t, stdout, s.About)
		for _, p := range s.Params {
			assert.Regexp(t, `(?m)^`+p.Name+` `, stdout)
		}
		for _, f := range s.Profiles {
			assert.Regexp(t, `(?m)^`+f.Name+` `, stdout)
		}
		for _, n := range s.Needs {
			assert.NotEmpty(t, signalWords[n], "%s needs %q, which signalWords does not explain", s.Name, n)
			assert.Contains(t, stdout, signalWords[n])
		}
		for _, show := range s.Internals {
			assert.Regexp(t, `(?m)^`+show.Name+` .*`+regexp.QuoteMeta(show.About), stdout)
		}
	}
}

func TestDefaultsAndProfilesReadBackAsWritten(t *testing.T) {
	for _, s := range cc.Specs() {
		for _, p := range s.Params {
			v, err := s.ParseParam(p.Name, p.FormatValue(p.Default))
			require.NoError(t, err, "%s %s", s.Name, p.Name)
			assert.Equal(t, p.Default, v, "%s %s", s.Name, p.Name)
		}
		for _, f := range s.Profiles {
			_, params, err := cc.Parse(s.Name + ":" + formatSettings(s, f.Params))
			require.NoError(t, err, "%s %s", s.Name, f.Name)
			assert.Equal(t, f.Params, params, "%s %s", s.Name, f.Name)
		}
	}
}
