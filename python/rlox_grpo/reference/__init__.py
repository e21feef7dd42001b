"""Reference policies for the KL penalty: frozen, periodic, adapter switched off, or on a server."""
