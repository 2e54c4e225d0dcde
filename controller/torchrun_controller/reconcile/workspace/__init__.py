"""Storage and code of a job: claims, and how the source gets onto them and to the workers."""
