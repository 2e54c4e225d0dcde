// The image that holds a pod's namespaces and prepares volumes' folders.
module torchrun.dev/cluster/pause

go 1.25.0
