package schema

import (
	"fmt"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
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
const Due = `v.kind = $1 AND v.since <= CAST($2 AS BIGINT) - CAST($3 AS BIGINT) AND v.since + $3 + $3 * v.jitter / 4000 <= $2 AND v.later <= $2`

// DueArgs are the arguments of Due, and the limit.
func DueArgs(kind ReviewKind, d catalog.Due) []any {
	return []any{int(kind), d.Now.UnixNano(), max(0, int64(d.Grace)), d.Limit}
}

// Review is the SQL that asks again, from now on.
func Review(d *database.Dialect, kind ReviewKind, repo, name string) string {
	return Reviews(d, fmt.Sprintf("SELECT %d, %s, %s, %s, %s WHERE true", kind, repo, name, d.Now, d.Jitter))
}

// Reviews is the SQL that asks again about what a query selects: kind, repository, name, time and jitter. The query has a WHERE.
func Reviews(d *database.Dialect, query string) string {
	return "INSERT INTO reviews (kind, repo, name, since, jitter) " + query +
		" ON CONFLICT (kind, repo, name) DO UPDATE SET since = excluded.since, jitter = excluded.jitter, tries = 0, later = 0"
}
