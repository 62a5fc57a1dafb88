"""What engines say about KV hand-offs in their logs."""
