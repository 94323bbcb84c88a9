"""The web console: an ordinary client of the broker that acts as the user who logged in.

`application.py` lists the pages. `visits.py` is what a page receives, `logins.py` holds the users, `guard.py` checks every request.
"""
