"""The model: load, score, pack, adapt and save; and the small one that is made on the spot."""
