"""One training that follows a stream: its reader, and the verb's part."""
