-- For pandoc: makes a manual page of what is written for the web. Tables become lists, since no
-- terminal is wide enough for them; links to files of this project become their text.

-- A row is an item: its first cell, below it the short ones in a line, then the last.
function Table(block)
  local simple = pandoc.utils.to_simple_table(block)
  local items = {}
  for _, row in ipairs(simple.rows) do
    local short = pandoc.Inlines {}
    for column = 2, #row - 1 do
      local cell = pandoc.utils.blocks_to_inlines(row[column])
      if #cell > 0 then
        if #short > 0 then short:extend { pandoc.Str(";"), pandoc.Space() } end
        short:extend { pandoc.Emph(simple.headers[column][1].content), pandoc.Str(": ") }
        short:extend(cell)
      end
    end
    local term = pandoc.utils.blocks_to_inlines(row[1])
    local definition = pandoc.Blocks {}
    if #short > 0 then definition:insert(pandoc.Para(short)) end
    definition:insert(pandoc.Para(pandoc.utils.blocks_to_inlines(row[#row])))
    table.insert(items, { term, { definition } })
  end
  return pandoc.DefinitionList(items)
end

function Link(link)
  if not link.target:match("^https?:") then return link.content end
end

function Header(header)
  if header.level == 1 then return pandoc.walk_block(header, { Str = upper, Code = upper }) end
end

function upper(text)
  return pandoc.Str(pandoc.text.upper(text.text))
end
