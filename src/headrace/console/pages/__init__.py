"""The pages of the console, one module per subject. A page is a function from a visit to a reply."""
