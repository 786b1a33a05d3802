"""What the command line does and shows; `cli` has its options. A command's tables are in `rendering`."""
