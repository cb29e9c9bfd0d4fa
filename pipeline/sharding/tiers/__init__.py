"""Tables larger than memory: slots in DRAM, a map, a row store on SSD, and what moves rows between them."""
