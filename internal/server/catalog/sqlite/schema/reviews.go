package schema

import (
	"fmt"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// ReviewKind is what is reviewed. The numbers are in the schema.
type ReviewKind int

// The kinds of reviews.
const (
	ReviewImage      ReviewKind = 1 // a manifest: its chain ID is not known
	ReviewLink       ReviewKind = 2 // a blob of a repository
	ReviewBlob       ReviewKind = 3 // of any repository, and what was ingested of it
	ReviewRootfs     ReviewKind = 4
	ReviewStartup    ReviewKind = 5 // an ID
	ReviewPack       ReviewKind = 6 // an ID
	ReviewRepository ReviewKind = 7
)

// ReviewNames are what people read.
var ReviewNames = map[ReviewKind]string{ReviewImage: "images", ReviewLink: "links", ReviewBlob: "layers", ReviewRootfs: "rootfs",
	ReviewStartup: "startup sets", ReviewPack: "packs", ReviewRepository: "repositories"}

// Due is the SQL of reviews that are due; its arguments are DueArgs.
const Due = `v.kind = ?1 AND v.since <= ?2 - ?3 AND v.since + ?3 + ?3 * v.jitter / 4000 <= ?2 AND v.later <= ?2`

// DueArgs are the arguments of Due, and the limit.
func DueArgs(kind ReviewKind, d catalog.Due) []any {
	return []any{int(kind), d.Now.UnixNano(), max(0, int64(d.Grace)), d.Limit}
}

// now and jitter are SQL.
const (
	now    = `CAST(unixepoch('subsec') * 1e9 AS INTEGER)`
	jitter = `abs(random() % 1000)`
)

// Review is the SQL that asks again, from now on.
func Review(kind ReviewKind, repo, name string) string {
	return fmt.Sprintf("INSERT OR REPLACE INTO reviews (kind, repo, name, since, jitter) VALUES (%d, %s, %s, %s, %s);\n", kind, repo, name, now, jitter)
}
