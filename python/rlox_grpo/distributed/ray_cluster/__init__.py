"""Start the ranks of a run as actors of a Ray cluster. Ray is imported when a cluster is asked for."""
