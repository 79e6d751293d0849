//! Reading Rust sources just well enough for the rules: what is code, and which words are in it.

/// `text` with comments, and the insides of string literals, blanked out; lines stay where they
/// are.
pub(super) fn without_comments_and_strings(text: &str) -> String {
    blank(text, true)
}

/// `text` with comments blanked out; lines stay where they are.
pub(super) fn without_comments(text: &str) -> String {
    blank(text, false)
}

/// Whether `word` stands in `line` as a whole identifier.
pub(super) fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        !line[..at].ends_with(is_part) && !line[at + word.len()..].starts_with(is_part)
    })
}

/// The text from `open` up to the bracket that closes it, `open` being the first character of
/// `text`; all of it if none does.
pub(super) fn bracketed(text: &str, open: char, close: char) -> &str {
    let mut depth = 0_usize;
    for (at, c) in text.char_indices() {
        if c == open {
            depth += 1;
        } else if c == close {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                return &text[..at];
            }
        }
    }
    text
}

/// The number of the line that byte `at` of `text` is on.
pub(super) fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

fn blank(text: &str, strings_too: bool) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (token, kept) = if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), false)
        } else if rest.starts_with("/*") {
            (block_comment(rest), false)
        } else if let Some(length) = string(rest, &code) {
            (length, !strings_too)
        } else {
            (character(rest).unwrap_or(first.len_utf8()), true)
        };
        let (token, after) = rest.split_at(token);
        if kept {
            code.push_str(token);
        } else {
            code.extend(token.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        }
        rest = after;
    }
    code
}

fn block_comment(text: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// The length of the string literal, plain or raw, that `text` begins with; `before` tells a raw
/// string from an identifier that ends in `r`.
fn string(text: &str, before: &str) -> Option<usize> {
    if let Some(inside) = text.strip_prefix('"') {
        let mut escaped = false;
        for (at, c) in inside.char_indices() {
            match c {
                '"' if !escaped => return Some(at + 2),
                '\\' => escaped = !escaped,
                _ => escaped = false,
            }
        }
        return Some(text.len());
    }
    let hashes = text.strip_prefix('r')?;
    let opened = hashes.trim_start_matches('#');
    let marks = hashes.len() - opened.len();
    if !opened.starts_with('"') || before.ends_with(|c: char| c.is_alphanumeric() && c != 'b') {
        return None;
    }
    let end = format!("\"{}", "#".repeat(marks));
    let length = opened[1..].find(&end).map_or(opened.len(), |at| 1 + at + end.len());
    Some(1 + marks + length)
}

/// The length of the character literal that `text` begins with, so that `'"'` opens no string; a
/// lifetime is none.
fn character(text: &str) -> Option<usize> {
    let inside = text.strip_prefix('\'')?;
    if inside.starts_with('\\') {
        return Some(1 + 2 + inside.get(2..)?.find('\'')? + 1);
    }
    let length = inside.chars().next()?.len_utf8();
    inside[length..].starts_with('\'').then_some(1 + length + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_blanked_and_lines_stay() {
        let text =
            "a // aya\n/* b /* c */ d\n*/ e \"f // \\\" g\" 'h' '\"' i\nj r#\"k \" l\"# m b'\\'' n";
        let code = without_comments_and_strings(text);
        for kept in ["a", "e", "i", "j", "m", "n"] {
            assert!(has_word(&code, kept), "{kept} in {code}");
        }
        for gone in ["aya", "b", "c", "d", "f", "g", "k", "l"] {
            assert!(!code.split_whitespace().any(|word| word == gone), "{gone} in {code}");
        }
        assert_eq!(code.matches('\n').count(), text.matches('\n').count());
        assert!(without_comments(text).contains("f // \\\" g"));
        assert!(without_comments("fn f<'a>(x: &'a str) {} // y").trim_end().ends_with("{}"));
    }

    #[test]
    fn words_are_whole() {
        assert!(has_word("use aya::Ebpf;", "aya"));
        assert!(!has_word("use aya_log::x; papaya", "aya"));
    }

    #[test]
    fn brackets_nest() {
        assert_eq!(bracketed("(a(b)c)d", '(', ')'), "(a(b)c");
    }
}
