package figures

import (
	"math"
	"strconv"
	"strings"
)

// Number writes three significant digits or the whole part, whichever is more.
func Number(v float64) string {
	decimals := 0
	switch a := math.Abs(v); {
	case v == math.Trunc(v):
	case a < 10:
		decimals = 2
	case a < 100:
		decimals = 1
	}
	s := strconv.FormatFloat(v, 'f', decimals, 64)
	if decimals > 0 {
		s = strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
	}
	return s
}

// Exact writes up to nine significant digits: figures that differ have texts that differ, but for the error of
// arithmetic.
func Exact(v float64) string {
	nine, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'e', 8, 64), 64) // never fails
	return strconv.FormatFloat(nine, 'f', -1, 64)
}

// Percent returns what writes a share in per cent.
func Percent(decimals int) func(share float64) string {
	return func(share float64) string { return strconv.FormatFloat(share*100, 'f', decimals, 64) }
}

// Ratio writes a/b as one says it: 0.95×, 1.20×, or 1/34 where it is small.
func Ratio(a, b float64) string {
	switch {
	case b <= 0 || a < 0:
		return "-"
	case a == 0:
		return "0"
	case a/b <= 0.5:
		return "1/" + Number(math.Round(b/a*10)/10)
	}
	return strconv.FormatFloat(a/b, 'f', 2, 64) + "×"
}
