"""The command `tune`: try changes that the advice suggests, and verify them by alternating runs."""
