"""The controllers: what each does about one of its keys, a file each."""
