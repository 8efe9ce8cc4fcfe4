package main

import (
	"fmt"
	"io"
	"strings"

	"rsc.io/qr"
)

// quietZone is how many modules around a QR code stay light (ISO/IEC 18004).
const quietZone = 4

// writeQR draws text as a QR code, two modules to a character, dark on light
// whatever the terminal's own colours are.
func writeQR(w io.Writer, text string) error {
	code, err := qr.Encode(text, qr.L)
	if err != nil {
		return fmt.Errorf("this configuration is too long for a QR code; --no-qr does without: %w", err)
	}
	var b strings.Builder
	for y := -quietZone; y < code.Size+quietZone; y += 2 {
		b.WriteString("\x1b[30;107m")
		for x := -quietZone; x < code.Size+quietZone; x++ {
			// Black is false outside of the code.
			switch upper, lower := code.Black(x, y), code.Black(x, y+1); {
			case upper && lower:
				b.WriteRune('█')
			case upper:
				b.WriteRune('▀')
			case lower:
				b.WriteRune('▄')
			default:
				b.WriteByte(' ')
			}
		}
		b.WriteString("\x1b[0m\n")
	}
	_, err = io.WriteString(w, b.String())
	return err
}
