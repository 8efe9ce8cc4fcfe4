// Package config is the configuration file: how it is read, its schema, the checks between its sections, and what may
// change while the proxy runs. The rooms of the proxy own their keys: each has a struct with yaml tags, a comment
// above each field that says what the key is for, and Validate. This package decodes, finds the place of each mistake,
// and reports. It opens nothing but the files that a configuration names.
//
// A new key is a field with its comment in the file of its room, a check in that room's Validate, its use, and
// docs/configuration.md, which make docs writes.
//
// Files call only files further down this list:
//
//	load.go       Load and Save: a file with the files that it names
//	reload.go     what may change while the proxy runs
//	files.go      the files that a configuration names
//	check.go      checks between sections, and warnings
//	reading.go    decoding, and mistakes with their places
//	bounds.go     limits of size that the YAML library lacks
//	excerpt.go    the lines around a mistake
//	schema.go     the JSON Schema
//	config.go     all sections together, and their defaults
//	scalars.go    types of one value: how they are written
//	process.go    sections of the process itself
//	node.go       values of YAML, and errors about them
//	fields.go     the tags of fields
//	error.go      mistakes as they are reported
//	statefile.go  files that are replaced atomically
package config
