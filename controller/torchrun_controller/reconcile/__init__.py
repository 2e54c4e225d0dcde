"""The pure core: what is observed goes in, a Plan comes out."""
