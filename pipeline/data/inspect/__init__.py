"""Look at raw rows before they are prepared, and propose the data config that reads them."""
