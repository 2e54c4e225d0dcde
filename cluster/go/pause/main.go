// Pause is the whole content of the local cluster's own image. Without arguments it holds a pod's
// namespaces; with the arguments of local-path-provisioner's helper pod it makes or removes a
// volume's folder.
package main

import (
	"flag"
	"log"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	action := flag.String("a", "pause", "what to do: pause, create or delete")
	path := flag.String("p", "", "the volume's folder")
	flag.String("s", "", "the volume's size in bytes, which nothing enforces")
	flag.String("m", "", "the volume's mode, always Filesystem")
	flag.Parse()

	var err error
	switch *action {
	case "create":
		err = create(*path)
	case "delete":
		err = os.RemoveAll(*path)
	case "pause":
		pause()
	default:
		log.Fatalf("unknown action %q", *action)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func create(path string) error {
	if err := os.MkdirAll(path, 0o777); err != nil {
		return err
	}
	// Not subject to the umask: pods of any user may write.
	return os.Chmod(path, 0o777)
}

// pause waits for SIGTERM and meanwhile reaps orphans, as the first process of a namespace must.
func pause() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGTERM, syscall.SIGINT)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 || err != nil {
				break
			}
		}
	}
}
