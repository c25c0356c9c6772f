"""The changes inside torch; `registry` lists them, and says what became of each."""
