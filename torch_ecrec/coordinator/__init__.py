"""Who is a member, which server has which slot, and where training goes on when trainers were lost."""
