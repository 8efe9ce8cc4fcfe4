package cc

// Nearest returns the one of words that word is most like, as a typing error is; empty: none. Two words are like each
// other where at most two letters are wrong, missing, too many or in each other's place, and one in a short word.
func Nearest(word string, words []string) string {
	nearest, least := "", min(3, max(2, len(word)/2+1))
	for _, w := range words {
		if d := EditDistance(word, w); d < least {
			nearest, least = w, d
		}
	}
	return nearest
}

// maxCompared bounds the words that EditDistance compares, in bytes.
const maxCompared = 64

// EditDistance is the optimal string alignment distance: the Levenshtein distance in which two neighbours that have
// changed places count once. Long words are simply far apart.
func EditDistance(a, b string) int {
	if len(a) > maxCompared || len(b) > maxCompared {
		return maxCompared
	}
	var before, last [maxCompared + 1]int // rows of the table for the prefixes of a that are two and one byte shorter
	for j := range len(b) + 1 {
		last[j] = j
	}
	for i := range len(a) {
		row := [maxCompared + 1]int{i + 1}
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(last[j+1]+1, row[j]+1, last[j]+cost)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}

// orNearest is a sentence that ends an error about a word that is not one of words; empty: none of them is like it.
func orNearest(word string, words []string) string {
	if n := Nearest(word, words); n != "" {
		return "; did you mean " + n + "?"
	}
	return ""
}
