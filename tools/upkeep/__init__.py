"""What a maintainer runs: a new release, a changed patch, the generated pages. Nothing else imports it."""
