"""kubectl torchrun: submit a local directory as a distributed run and follow it."""
