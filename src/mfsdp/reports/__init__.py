"""What people look at: reports, pages, dumps, profiles."""
