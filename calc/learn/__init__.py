"""The small models behind the page that teaches: each shows one reason why the numbers are what they are."""
