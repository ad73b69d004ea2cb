package site

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"

	"golang.org/x/sys/unix"
)

// follower reads what is new in a file when the kernel says that there is something
// (inotify(7)): who waits for a line that comes after seconds takes nothing of the cores meanwhile.
type follower struct {
	file   *os.File
	watch  *os.File
	wrote  chan struct{} // has room for one: something was written since it was empty
	done   chan struct{}
	text   []byte // of the file, all that was read
	buffer []byte
}

func follow(path string) (_ *follower, err error) {
	f := &follower{wrote: make(chan struct{}, 1), done: make(chan struct{}), buffer: make([]byte, 64<<10)}
	defer func() {
		if err != nil && f.file != nil {
			f.file.Close()
		}
	}()
	if f.file, err = os.Open(path); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("bench: inotify: %w", err)
	}
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bench: watch %s: %w", path, err)
	}
	f.watch = os.NewFile(uintptr(fd), "inotify")
	go f.listen()
	return f, nil
}

// listen passes on that something was written, until the watch is closed.
func (f *follower) listen() {
	defer close(f.done)
	events := make([]byte, 4096)
	for {
		if _, err := f.watch.Read(events); err != nil {
			return
		}
		select {
		case f.wrote <- struct{}{}:
		default:
		}
	}
}

// says reports whether the file's text matches, as far as it has been written.
func (f *follower) says(line *regexp.Regexp) (bool, error) {
	before := len(f.text)
	for {
		n, err := f.file.Read(f.buffer)
		f.text = append(f.text, f.buffer[:n]...)
		if errors.Is(err, io.EOF) {
			return len(f.text) > before && line.Match(f.text), nil
		}
		if err != nil {
			return false, fmt.Errorf("bench: %w", err)
		}
	}
}

func (f *follower) close() {
	f.watch.Close()
	<-f.done
	f.file.Close()
}

// waitLine waits until the log of p has a line.
func (r Readiness) waitLine(ctx context.Context, p *Process) error {
	f, err := follow(p.Log)
	if err != nil {
		return err
	}
	defer f.close()
	what, ended := "wait for "+r.Probe, false
	for {
		// What was written before the watch began is read here as well.
		if said, err := f.says(r.line); said || err != nil {
			return err
		}
		if ended {
			return p.endedEarly(what)
		}
		select {
		case <-f.wrote:
		case <-p.Done:
			ended = true // its last words come first
		case <-ctx.Done():
			return p.gaveUp(ctx, what)
		}
	}
}
