"""The seven screens: each one module with what it shows, its own keys and its notices; `table` lists them."""
