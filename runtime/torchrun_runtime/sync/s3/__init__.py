"""The s3 source: the objects of a prefix, or one archive."""
