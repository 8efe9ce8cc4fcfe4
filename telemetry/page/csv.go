package page

import (
	"encoding/csv"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
)

// writeCSV writes the rows of a view, with the names that fields have in JSON as heads. Fields of a field have its
// name before theirs. What JSON leaves out is empty.
func writeCSV(w io.Writer, v View) error {
	out := csv.NewWriter(w)
	rows := map[string]any{
		"flows": v.Flows, "hosts": v.Hosts, "peers": v.Peers, "listeners": v.Listeners, "events": v.Events,
	}[v.Table]
	list := reflect.ValueOf(rows)
	_ = out.Write(appendHeads(nil, "", list.Type().Elem())) // Flush keeps the error
	for i := range list.Len() {
		if err := out.Write(appendCells(nil, list.Index(i), false)); err != nil {
			return err
		}
	}
	out.Flush()
	return out.Error()
}

// appendHeads appends the heads of the columns that the fields of a struct have.
func appendHeads(to []string, before string, t reflect.Type) []string {
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		if inner, nested := structOf(t.Field(i).Type); nested {
			to = appendHeads(to, before+name+"_", inner)
			continue
		}
		to = append(to, before+name)
	}
	return to
}

// structOf returns the struct that a field has or points to.
func structOf(t reflect.Type) (reflect.Type, bool) {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t, t.Kind() == reflect.Struct
}

// appendCells appends the cells of a struct. All are empty if it is absent.
func appendCells(to []string, v reflect.Value, absent bool) []string {
	for i := range v.NumField() {
		f, t := v.Field(i), v.Type().Field(i)
		empty := absent || strings.Contains(t.Tag.Get("json"), ",omitempty") && f.IsZero()
		if inner, nested := structOf(t.Type); nested {
			if f.Kind() == reflect.Pointer {
				f = f.Elem()
			}
			if !f.IsValid() {
				f = reflect.Zero(inner)
			}
			to = appendCells(to, f, empty)
			continue
		}
		text := ""
		if !empty {
			text = cellText(f)
		}
		to = append(to, text)
	}
	return to
}

// cellText writes the value of a field. A text that a spreadsheet takes for a formula gets an apostrophe before it,
// because clients and servers choose some of the texts.
func cellText(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Pointer:
		return cellText(v.Elem())
	case reflect.Int, reflect.Int64:
		return strconv.FormatInt(v.Int(), 10)
	case reflect.Float64:
		return strconv.FormatFloat(v.Float(), 'f', -1, 64)
	case reflect.Slice:
		return strings.Trim(fmt.Sprint(v), "[]")
	case reflect.String:
		if text := v.String(); text != "" && strings.ContainsRune("=+-@\t\r", rune(text[0])) {
			return "'" + text
		}
	}
	return fmt.Sprint(v)
}
