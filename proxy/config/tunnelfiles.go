package config

import (
	"errors"
	"fmt"
	"io/fs"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/proxy/access"
)

// readTunnelFiles puts what the listener's files hold in its place.
func (l *Listener) readTunnelFiles(key string, from *files) error {
	if l.Mode == access.MASQUE {
		return l.readMASQUEFiles(key, from)
	}
	w := &l.WireGuard
	key += ".wireguard"
	errs := []error{from.readKey(key+".private_key_file", &w.PrivateKeyFile, &w.PrivateKey)}
	for i := range w.Peers {
		p := &w.Peers[i]
		at := fmt.Sprintf("%s.peers[%d].preshared_key_file", key, i)
		errs = append(errs, from.readKey(at, &p.PresharedKeyFile, &p.PresharedKey))
	}
	switch {
	case w.ConfigFile != "":
		errs = append(errs, l.readConfigFile(key+".config_file", from))
	case w.PeersFile != "":
		errs = append(errs, w.readPeers(key+".peers_file", from))
	}
	return errors.Join(errs...)
}

// readConfigFile takes over what is in a file that wg-quick has.
func (l *Listener) readConfigFile(key string, from *files) error {
	f, err := from.readQuickFile(key, l.WireGuard.ConfigFile)
	if err == nil {
		err = l.adoptQuickFile(f, key, from.displayPath(l.WireGuard.ConfigFile))
	}
	if err != nil {
		return err
	}
	l.WireGuard.ConfigFile = ""
	return nil
}

// readPeers adds the peers of a file.
func (w *WireGuard) readPeers(key string, from *files) error {
	f, err := from.readQuickFile(key, w.PeersFile)
	if err != nil {
		return err
	}
	if (f.PrivateKey != access.Key{}) {
		return keyErrorf(key, "it has an [Interface] section with a private key; write config_file: %s instead",
			w.PeersFile)
	}
	if err := f.CheckExits(w.Pool); err != nil {
		return keyErrorf(key, "%s: %v", from.displayPath(w.PeersFile), err)
	}
	if err := w.addPeers(f.Peers); err != nil {
		return keyErrorf(key, "%v", err)
	}
	w.PeersFile = ""
	return nil
}

// adoptQuickFile takes over what a whole file of wg-quick's says and the listener does not.
func (l *Listener) adoptQuickFile(f access.QuickFile, key, file string) error {
	if (f.PrivateKey == access.Key{}) {
		return keyErrorf(key, "it has no PrivateKey in an [Interface] section; a file of peers alone is a peers_file")
	}
	l.WireGuard.PrivateKey = f.PrivateKey
	if l.Address == "" {
		if f.Port == 0 {
			return keyErrorf(key, "it has no ListenPort; add one, or set address to a port such as :51820")
		}
		l.Address = ":" + strconv.Itoa(int(f.Port))
	}
	if l.Tunnel.MTU == 0 && f.MTU != 0 {
		l.Tunnel.MTU = f.MTU
		if inBounds(key, reflect.ValueOf(l.Tunnel)) != nil {
			return keyErrorf(key, "MTU = %d is outside 1280 to 65535", f.MTU)
		}
	}
	if len(l.WireGuard.Pool) == 0 {
		for _, a := range f.Addresses {
			if a.Addr().BitLen()-a.Bits() >= 2 && !slices.ContainsFunc(l.WireGuard.Pool, a.Overlaps) {
				l.WireGuard.Pool = append(l.WireGuard.Pool, a.Masked())
			}
		}
	}
	if err := f.CheckExits(l.WireGuard.Pool); err != nil {
		return keyErrorf(key, "%s: %v", file, err)
	}
	if err := l.WireGuard.addPeers(f.Peers); err != nil {
		return keyErrorf(key, "%v", err)
	}
	return nil
}

// addPeers adds peers, unless they cannot stand beside those that there are.
func (w *WireGuard) addPeers(peers []access.Peer) error {
	w.Peers = w.Peers[:len(w.Peers):len(w.Peers)]
	for _, p := range peers {
		w.Peers = append(w.Peers, Peer{
			Name: p.Name, PublicKey: p.PublicKey, PresharedKey: p.Preshared,
			AllowedIPs: p.AllowedIPs, Keepalive: p.Keepalive, Exit: p.Exit,
		})
	}
	return access.CheckPeers(w.Access())
}

// readKey puts the key in the first line of a file where its name was.
func (f *files) readKey(key string, path *string, to *access.Key) error {
	if *path == "" {
		return nil
	}
	line, err := f.firstLine(key, *path)
	if err != nil {
		return err
	}
	k, err := access.ParseKey(strings.TrimSpace(line))
	if err != nil {
		return keyErrorf(key, "%s: %v", *path, err)
	}
	*to, *path = k, ""
	return nil
}

// readQuickFile reads a file in wg-quick's format; one with secrets must be closed to others.
func (f *files) readQuickFile(key, path string) (access.QuickFile, error) {
	data, err := f.readBytes(path)
	if errors.Is(err, fs.ErrNotExist) {
		cure := "penstock gateway peer add makes a peers_file, and so does touch"
		if strings.HasSuffix(key, ".config_file") {
			cure = "penstock gateway init makes a configuration of its own; the file of a wg-quick interface is " +
				"/etc/wireguard/INTERFACE.conf"
		}
		return access.QuickFile{}, keyErrorf(key, "there is no %s; %s", f.displayPath(path), cure)
	}
	if err != nil {
		return access.QuickFile{}, keyErrorf(key, "%s: %v", f.displayPath(path), err)
	}
	q, err := access.ParseQuick(string(data))
	if err != nil {
		return q, keyErrorf(key, "%s: %v", f.pathOf(path), err)
	}
	secret := q.PrivateKey != access.Key{}
	for _, p := range q.Peers {
		secret = secret || p.Preshared != access.Key{}
	}
	if secret {
		if err := f.checkPrivate(path); err != nil {
			return q, keyErrorf(key, "%v", err)
		}
	}
	return q, nil
}
