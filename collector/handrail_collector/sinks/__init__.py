"""Where accepted data goes beside the store."""
