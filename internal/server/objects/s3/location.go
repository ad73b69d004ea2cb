package s3

import (
	"fmt"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/server/objects"
)

// Scheme begins the URL of a bucket.
const Scheme = "s3://"

// Location says where a bucket is, and how it is spoken to. Its text form is a URL:
//
//	s3://BUCKET[/PREFIX][?KEY=VALUE&...]
//
//	endpoint     http:// or https://HOST[:PORT]; without one it is Amazon's
//	region       us-east-1, unless AWS_REGION in the environment says another one
//	style        path: ENDPOINT/BUCKET/KEY; host: BUCKET.ENDPOINT/KEY; without it host at Amazon's, path elsewhere
//	ca           a file with certificates in PEM form that vouch for the endpoint, besides the system's
//	credentials  env, iam, or a file; without it see findCredentials
//	profile      the section of that file; without it AWS_PROFILE, or default
//	timeout      for how long the store may send or take nothing, as 30s
type Location struct {
	Bucket      string
	Prefix      string // a key; empty, or without a '/' at its end
	Endpoint    string // with its scheme
	Region      string
	Style       string
	CA          string
	Credentials string
	Profile     string
	Timeout     time.Duration
}

// Values of Location.Style.
const (
	StylePath = "path"
	StyleHost = "host"
)

// amazon is asked when no endpoint is named.
const amazon = "https://s3.amazonaws.com"

// defaultTimeout is Location.Timeout if none is said.
const defaultTimeout = 30 * time.Second

var bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]+[a-z0-9]$`)

// longestBucket is the longest name of a bucket. A bound in the expression would cost 40 kB each time that foil starts.
const longestBucket = 63

// Parse reads the text form of a location. Credentials are no part of it: it may be shown.
func Parse(s string) (l Location, err error) {
	fail := func(format string, args ...any) (Location, error) {
		return Location{}, fmt.Errorf("store %q: %w", s, fmt.Errorf(format, args...))
	}
	u, err := url.Parse(s)
	if err != nil {
		return fail("it is no URL: %v", err)
	}
	if u.Scheme != "s3" || u.Opaque != "" {
		return fail("want s3://BUCKET[/PREFIX][?endpoint=URL&...]")
	}
	if u.User != nil {
		return fail("no credentials belong into it: they come from the environment or a file")
	}
	l.Bucket, l.Prefix = u.Host, strings.Trim(u.Path, "/")
	if len(l.Bucket) > longestBucket || !bucketName.MatchString(l.Bucket) {
		return fail("%q is no name of a bucket: 3 to 63 of a-z 0-9 . -", l.Bucket)
	}
	if l.Prefix != "" {
		if err := objects.CheckKey(l.Prefix); err != nil || len(l.Prefix) > 255 {
			return fail("its prefix wants elements of a-z 0-9 . _ -, 255 bytes at most")
		}
	}
	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return fail("%v", err)
	}
	fields := map[string]*string{"endpoint": &l.Endpoint, "region": &l.Region, "style": &l.Style, "ca": &l.CA, "credentials": &l.Credentials, "profile": &l.Profile}
	for key, values := range q {
		if len(values) != 1 || values[0] == "" {
			return fail("%s wants one value", key)
		}
		if field := fields[key]; field != nil {
			*field = values[0]
			continue
		}
		if key != "timeout" {
			return fail("there is no %q: want endpoint, region, style, ca, credentials, profile or timeout", key)
		}
		if l.Timeout, err = time.ParseDuration(values[0]); err != nil || l.Timeout < time.Second || l.Timeout > time.Hour {
			return fail("timeout %q: want 1s to 1h", values[0])
		}
	}
	if !slices.Contains([]string{"", StylePath, StyleHost}, l.Style) {
		return fail("style %q: want path or host", l.Style)
	}
	if l.Endpoint != "" {
		if err := checkEndpoint(l.Endpoint); err != nil {
			return fail("%v", err)
		}
	}
	return l, nil
}

func checkEndpoint(s string) error {
	e, err := url.Parse(s)
	if err != nil || e.Scheme != "http" && e.Scheme != "https" || e.Host == "" || strings.Trim(e.Path, "/") != "" || e.RawQuery != "" || e.User != nil {
		return fmt.Errorf("endpoint %q: want http://HOST[:PORT] or https://HOST[:PORT]", s)
	}
	return nil
}

// String is the text form.
func (l Location) String() string {
	u := url.URL{Scheme: "s3", Host: l.Bucket, Path: l.Prefix}
	q := url.Values{}
	for key, value := range map[string]string{"endpoint": l.Endpoint, "region": l.Region, "style": l.Style, "ca": l.CA, "credentials": l.Credentials, "profile": l.Profile} {
		if value != "" {
			q.Set(key, value)
		}
	}
	if l.Timeout > 0 {
		q.Set("timeout", l.Timeout.String())
	}
	u.RawQuery = q.Encode()
	return u.String()
}

// region is that of the bucket.
func (l Location) region() string {
	for _, r := range []string{l.Region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION")} {
		if r != "" {
			return r
		}
	}
	return "us-east-1"
}
