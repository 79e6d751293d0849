//! A TOML document with places, and the list of what is wrong with it.
//!
//! Values are read one by one; whatever is wrong is noted with its place, and reading goes on. A
//! reading function answers `None` after it has noted something.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Config, ConfigErrors, Diagnostic, keys};

/// A file being read.
pub(super) struct Reader<'t> {
    file: &'t str,
    text: &'t str,
    /// Where each line begins.
    lines: Vec<usize>,
    errors: RefCell<Vec<Diagnostic>>,
    warnings: RefCell<Vec<Diagnostic>>,
}

impl<'t> Reader<'t> {
    pub(super) fn new(file: &'t str, text: &'t str) -> Self {
        // Editors do not show a byte order mark, so it is no column of the first line.
        let first = if text.starts_with('\u{feff}') { '\u{feff}'.len_utf8() } else { 0 };
        let newlines = text.match_indices('\n').map(|(newline, _)| newline + 1);
        let lines = std::iter::once(first).chain(newlines).collect();
        Self { file, text, lines, errors: RefCell::default(), warnings: RefCell::default() }
    }

    /// The file as TOML.
    pub(super) fn document(&self) -> Result<Spanned<DeTable<'t>>, ConfigErrors> {
        let (document, errors) = DeTable::parse_recoverable(self.text);
        let errors: Vec<_> = errors
            .iter()
            .map(|error| {
                let offset = error.span().map_or(self.text.len(), |span| span.start);
                let message = error.message();
                let place = error.span().and_then(|span| self.text.get(span)).unwrap_or_default();
                let (cause, cure) = match (message, place) {
                    ("duplicate key", key) if !key.is_empty() => {
                        (format!("not TOML: {message} {key}"), "remove or rename one of the two")
                    }
                    _ => (format!("not TOML: {message}"), "see https://toml.io for the syntax"),
                };
                self.diagnostic(offset, String::new(), cause, cure.to_owned())
            })
            .collect();
        // One mistake may upset the parser more than once in its line.
        let mut errors = ConfigErrors::new(errors).as_slice().to_vec();
        errors.dedup_by_key(|error| error.line);
        if errors.is_empty() { Ok(document) } else { Err(ConfigErrors::new(errors)) }
    }

    pub(super) fn root<'r>(&'r self, document: &'r Spanned<DeTable<'t>>) -> Table<'r> {
        let place = Place { reader: self, key: String::new(), offset: 0 };
        Table::new(place, String::new(), document.get_ref())
    }

    /// The configuration if nothing was wrong, with its warnings.
    pub(super) fn finish(self, config: Option<Config>) -> Result<Config, ConfigErrors> {
        let errors = ConfigErrors::new(self.errors.into_inner());
        match config {
            Some(config) if errors.as_slice().is_empty() => {
                let warnings = ConfigErrors::new(self.warnings.into_inner());
                Ok(Config { warnings: warnings.as_slice().to_vec(), ..config })
            }
            _ => Err(errors),
        }
    }

    /// What to say about bytes that are not text, after `text`.
    pub(super) fn not_text(&self) -> ConfigErrors {
        let cause = "not TOML: this is not UTF-8 text".to_owned();
        let cure = "save the file in UTF-8".to_owned();
        ConfigErrors::new(vec![self.diagnostic(self.text.len(), String::new(), cause, cure)])
    }

    fn diagnostic(&self, offset: usize, key: String, cause: String, cure: String) -> Diagnostic {
        let line = self.line(offset);
        let before = self.text.get(self.lines[line - 1]..offset).unwrap_or_default();
        Diagnostic {
            file: self.file.to_owned(),
            line,
            column: before.chars().count() + 1,
            key: on_one_line(key),
            cause: on_one_line(cause),
            cure: on_one_line(cure),
        }
    }

    /// The line of `offset`, counted from 1.
    fn line(&self, offset: usize) -> usize {
        self.lines.partition_point(|start| *start <= offset).max(1)
    }
}

/// Where something stands.
#[derive(Clone)]
pub(super) struct Place<'r> {
    reader: &'r Reader<'r>,
    key: String,
    offset: usize,
}

impl Place<'_> {
    /// Notes an error here.
    pub(super) fn error(&self, cause: impl Into<String>, cure: impl Into<String>) {
        self.reader.errors.borrow_mut().push(self.diagnostic(cause.into(), cure.into()));
    }

    /// Notes a warning here.
    pub(super) fn warn(&self, cause: impl Into<String>, cure: impl Into<String>) {
        self.reader.warnings.borrow_mut().push(self.diagnostic(cause.into(), cure.into()));
    }

    pub(super) fn file(&self) -> &str {
        self.reader.file
    }

    pub(super) fn line(&self) -> usize {
        self.reader.line(self.offset)
    }

    fn diagnostic(&self, cause: String, cure: String) -> Diagnostic {
        self.reader.diagnostic(self.offset, self.key.clone(), cause, cure)
    }

    fn inner(&self, key: &str, offset: usize) -> Self {
        let key = match self.key.as_str() {
            "" => key.to_owned(),
            // A label ends the part of the path before it.
            outer if outer.ends_with('"') => format!("{outer} {key}"),
            outer => format!("{outer}.{key}"),
        };
        Self { reader: self.reader, key, offset }
    }

    fn item(&self, index: usize, offset: usize) -> Self {
        Self { reader: self.reader, key: format!("{}[{index}]", self.key), offset }
    }
}

/// A table whose keys are all known: the others were noted when it was made.
pub(super) struct Table<'r> {
    place: Place<'r>,
    path: String,
    entries: &'r DeTable<'r>,
}

impl<'r> Table<'r> {
    fn new(place: Place<'r>, path: String, entries: &'r DeTable<'r>) -> Self {
        let known = keys::of(&path);
        for key in entries.keys().filter(|key| !known.contains(&key.get_ref().as_ref())) {
            let (cause, cure) = keys::unknown(&path, key.get_ref());
            place.inner(key.get_ref(), key.span().start).error(cause, cure);
        }
        Self { place, path, entries }
    }

    /// Where the table begins.
    pub(super) fn place(&self) -> &Place<'r> {
        &self.place
    }

    /// The value of `key`.
    pub(super) fn get(&self, key: &'static str) -> Option<Value<'r>> {
        debug_assert!(keys::of(&self.path).contains(&key), "{key} is missing in keys.rs");
        let (_, value) = self.entries.iter().find(|(found, _)| found.get_ref() == key)?;
        Some(Value {
            place: self.place.inner(key, value.span().start),
            path: join(&self.path, key),
            raw: value.get_ref(),
        })
    }

    /// The value of `key`, which must be there.
    pub(super) fn require(&self, key: &'static str, example: &str) -> Option<Value<'r>> {
        let found = self.get(key);
        if found.is_none() && !self.misspells(key) {
            self.place.inner(key, self.place.offset).error("missing", format!("add {example}"));
        }
        found
    }

    /// Whether an unknown key, which was noted, is most likely meant to be `key`.
    pub(super) fn misspells(&self, key: &str) -> bool {
        let known = keys::of(&self.path);
        let mut unknown = self.entries.keys().map(|found| found.get_ref().as_ref());
        unknown.any(|found| !known.contains(&found) && keys::nearest(found, known) == Some(key))
    }

    /// The tables of the list `key`, none if it is not there; `None` if it is not a list, or is
    /// misspelt. Each one's place is labelled with the value of its key `label`.
    pub(super) fn tables(&self, key: &'static str, label: &'static str) -> Option<Vec<Table<'r>>> {
        let Some(value) = self.get(key) else {
            return (!self.misspells(key)).then(Vec::new);
        };
        let DeValue::Array(items) = value.raw else {
            value.mistyped("a list of tables", &format!("write [[{}]]", value.path));
            return None;
        };
        let items = items.iter().enumerate();
        let tables = items
            .filter_map(|(index, item)| {
                let place = value.place.item(index, item.span().start);
                let path = value.path.clone();
                let mut item = Value { place, path, raw: item.get_ref() };
                if let DeValue::Table(entries) = item.raw {
                    let name = entries.iter().find(|(found, _)| found.get_ref() == label);
                    if let Some(name) = name.and_then(|(_, name)| name.get_ref().as_str()) {
                        item.place.key = format!("{} \"{name}\"", item.place.key);
                    }
                }
                item.table(&format!("write [[{}]]", value.path))
            })
            .collect();
        Some(tables)
    }
}

/// A value whose type is not known yet.
pub(super) struct Value<'r> {
    place: Place<'r>,
    path: String,
    raw: &'r DeValue<'r>,
}

impl<'r> Value<'r> {
    pub(super) fn place(&self) -> &Place<'r> {
        &self.place
    }

    pub(super) fn raw(&self) -> &'r DeValue<'r> {
        self.raw
    }

    pub(super) fn string(&self, cure: &str) -> Option<&'r str> {
        let found = self.raw.as_str();
        if found.is_none() {
            self.mistyped("a string", cure);
        }
        found
    }

    pub(super) fn boolean(&self) -> Option<bool> {
        let found = self.raw.as_bool();
        if found.is_none() {
            self.mistyped("a boolean", "write true or false");
        }
        found
    }

    /// A whole number in `range`.
    pub(super) fn integer(&self, range: RangeInclusive<u64>) -> Option<u64> {
        let cure = format!("write a whole number from {} to {}", range.start(), range.end());
        self.integer_or(range, &cure)
    }

    /// A whole number in `range`, with a cure of the caller's.
    pub(super) fn integer_or(&self, range: RangeInclusive<u64>, cure: &str) -> Option<u64> {
        let Some(text) = self.raw.as_integer() else {
            self.mistyped("a whole number", cure);
            return None;
        };
        let number = u64::from_str_radix(text.as_str(), text.radix()).ok();
        let number = number.filter(|number| range.contains(number));
        if number.is_none() {
            self.place.error(format!("{text} is out of range"), cure);
        }
        number
    }

    /// One of some words.
    pub(super) fn choice<T: Copy>(&self, choices: &[(&str, T)]) -> Option<T> {
        let words: Vec<_> = choices.iter().map(|(word, _)| format!("\"{word}\"")).collect();
        let cure = format!("write {}", words.join(" or "));
        let word = self.string(&cure)?;
        let found = choices.iter().find(|(choice, _)| *choice == word);
        if found.is_none() {
            self.place.error(format!("\"{word}\" is not a choice"), cure);
        }
        found.map(|(_, value)| *value)
    }

    pub(super) fn table(self, cure: &str) -> Option<Table<'r>> {
        let DeValue::Table(entries) = self.raw else {
            self.mistyped("a table", cure);
            return None;
        };
        Some(Table::new(self.place, self.path, entries))
    }

    /// The items of a list, or the value itself where it is not a list.
    pub(super) fn one_or_more(self) -> Vec<Value<'r>> {
        if self.raw.is_array() { self.list("") } else { vec![self] }
    }

    /// The items of a list; an empty one is an error.
    pub(super) fn list(&self, cure: &str) -> Vec<Value<'r>> {
        let DeValue::Array(items) = self.raw else {
            self.mistyped("a list", cure);
            return Vec::new();
        };
        if items.is_empty() {
            self.place.error("an empty list matches nothing", "fill it, or remove the key");
        }
        let items = items.iter().enumerate();
        items
            .map(|(index, item)| Value {
                place: self.place.item(index, item.span().start),
                path: self.path.clone(),
                raw: item.get_ref(),
            })
            .collect()
    }

    /// Notes that this is not what it should be.
    pub(super) fn mistyped(&self, expected: &str, cure: &str) {
        let found = match self.raw {
            DeValue::String(_) => "a string",
            DeValue::Integer(_) => "a whole number",
            DeValue::Float(_) => "a decimal number",
            DeValue::Boolean(_) => "a boolean",
            DeValue::Datetime(_) => "a date or time",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        self.place.error(format!("expected {expected}, found {found}"), cure);
    }
}

/// What the file says is quoted in messages, which are one line each and go to terminals and logs.
fn on_one_line(text: String) -> String {
    if !text.contains(char::is_control) {
        return text;
    }
    text.chars().fold(String::new(), |mut line, letter| {
        if letter.is_control() {
            line.extend(letter.escape_default());
        } else {
            line.push(letter);
        }
        line
    })
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}
