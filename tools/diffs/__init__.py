"""A unified diff: read, judged against releases, written as a patch's folder."""
