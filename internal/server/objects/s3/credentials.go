package s3

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// Values of Location.Credentials that are no file.
const (
	credentialsEnv = "env"
	credentialsIAM = "iam"
)

// findCredentials decides where credentials come from:
//
//   - a file of Location.Credentials, in the form of Amazon's programs, read again when it changes;
//   - env, or if AWS_ACCESS_KEY_ID is set: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN;
//   - iam, or if the environment has what it needs: a token of the pod (AWS_WEB_IDENTITY_TOKEN_FILE), the container's
//     endpoint (AWS_CONTAINER_CREDENTIALS_FULL_URI, ..._RELATIVE_URI), the machine's (AWS_EC2_METADATA_SERVICE_ENDPOINT). They
//     are had anew before they expire;
//   - the user's file, AWS_SHARED_CREDENTIALS_FILE or ~/.aws/credentials.
func findCredentials(l Location) (*credentials.Credentials, error) {
	set := func(names ...string) bool {
		for _, name := range names {
			if os.Getenv(name) != "" {
				return true
			}
		}
		return false
	}
	iam := func() *credentials.Credentials {
		// STSWebIdentity takes the same endpoint for another service: only a machine's is named.
		endpoint := os.Getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT")
		if set("AWS_WEB_IDENTITY_TOKEN_FILE") {
			endpoint = os.Getenv("AWS_ENDPOINT_URL_STS")
		}
		return credentials.New(&credentials.IAM{Endpoint: endpoint, Region: l.Region})
	}
	switch {
	case l.Credentials == credentialsEnv, l.Credentials == "" && set("AWS_ACCESS_KEY_ID"):
		if !set("AWS_ACCESS_KEY_ID") || !set("AWS_SECRET_ACCESS_KEY") {
			return nil, errors.New("credentials: the environment wants both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
		}
		return credentials.NewStaticV4(os.Getenv("AWS_ACCESS_KEY_ID"), os.Getenv("AWS_SECRET_ACCESS_KEY"), os.Getenv("AWS_SESSION_TOKEN")), nil
	case l.Credentials == credentialsIAM,
		l.Credentials == "" && set("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_EC2_METADATA_SERVICE_ENDPOINT"):
		return iam(), nil
	}
	file := l.Credentials
	if file == "" {
		if file = os.Getenv("AWS_SHARED_CREDENTIALS_FILE"); file == "" {
			if home, err := os.UserHomeDir(); err == nil {
				file = filepath.Join(home, ".aws", "credentials")
			}
		}
		if _, err := os.Stat(file); err != nil {
			return nil, errors.New("credentials: there are none: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a file by credentials=FILE, or credentials=iam for those of the machine")
		}
	}
	p := &fileCredentials{file: file, profile: l.Profile}
	if _, err := p.Retrieve(); err != nil {
		return nil, err
	}
	return credentials.New(p), nil
}

// fileCredentials are those of a file, as it is now.
type fileCredentials struct {
	file, profile string

	mu   sync.Mutex
	seen os.FileInfo // guarded by mu: the file as it was when it was read
}

// RetrieveWithCredContext implements credentials.Provider.
func (p *fileCredentials) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	info, err := os.Stat(p.file)
	if err != nil {
		return credentials.Value{}, fmt.Errorf("credentials: %w", err)
	}
	v, err := (&credentials.FileAWSCredentials{Filename: p.file, Profile: p.profile}).RetrieveWithCredContext(cc)
	if err == nil && (v.AccessKeyID == "" || v.SecretAccessKey == "") {
		err = errors.New("it lacks aws_access_key_id or aws_secret_access_key")
	}
	if err != nil {
		return credentials.Value{}, fmt.Errorf("credentials: %s: %w", p.file, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen = info
	return v, nil
}

// Retrieve implements credentials.Provider.
func (p *fileCredentials) Retrieve() (credentials.Value, error) {
	return p.RetrieveWithCredContext(nil)
}

// IsExpired implements credentials.Provider. A file that is being replaced is read when it is there again.
func (p *fileCredentials) IsExpired() bool {
	info, err := os.Stat(p.file)
	p.mu.Lock()
	defer p.mu.Unlock()
	// Two versions that were written at once have one time of change; the kernel's clock for it has ticks of milliseconds.
	return err == nil && (p.seen == nil || !os.SameFile(info, p.seen) || info.Size() != p.seen.Size() || !info.ModTime().Equal(p.seen.ModTime()))
}
