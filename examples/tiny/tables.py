"""The facts that the embedded model knows: data, one row a fact."""

# country | capital | continent
_COUNTRIES = """
Afghanistan|Kabul|Asia
Albania|Tirana|Europe
Algeria|Algiers|Africa
Angola|Luanda|Africa
Argentina|Buenos Aires|South America
Armenia|Yerevan|Asia
Australia|Canberra|Oceania
Austria|Vienna|Europe
Bangladesh|Dhaka|Asia
Belgium|Brussels|Europe
Bhutan|Thimphu|Asia
Botswana|Gaborone|Africa
Brazil|Brasilia|South America
Bulgaria|Sofia|Europe
Cambodia|Phnom Penh|Asia
Cameroon|Yaounde|Africa
Canada|Ottawa|North America
Chad|N'Djamena|Africa
Chile|Santiago|South America
China|Beijing|Asia
Colombia|Bogota|South America
Costa Rica|San Jose|North America
Croatia|Zagreb|Europe
Cuba|Havana|North America
Cyprus|Nicosia|Europe
Denmark|Copenhagen|Europe
Ecuador|Quito|South America
Egypt|Cairo|Africa
Estonia|Tallinn|Europe
Ethiopia|Addis Ababa|Africa
Fiji|Suva|Oceania
Finland|Helsinki|Europe
France|Paris|Europe
Georgia|Tbilisi|Asia
Germany|Berlin|Europe
Ghana|Accra|Africa
Greece|Athens|Europe
Guyana|Georgetown|South America
Haiti|Port-au-Prince|North America
Honduras|Tegucigalpa|North America
Hungary|Budapest|Europe
Iceland|Reykjavik|Europe
India|New Delhi|Asia
Indonesia|Jakarta|Asia
Iran|Tehran|Asia
Iraq|Baghdad|Asia
Ireland|Dublin|Europe
Italy|Rome|Europe
Jamaica|Kingston|North America
Japan|Tokyo|Asia
Jordan|Amman|Asia
Kenya|Nairobi|Africa
Laos|Vientiane|Asia
Latvia|Riga|Europe
Lebanon|Beirut|Asia
Libya|Tripoli|Africa
Lithuania|Vilnius|Europe
Malaysia|Kuala Lumpur|Asia
Mali|Bamako|Africa
Malta|Valletta|Europe
Mexico|Mexico City|North America
Mongolia|Ulaanbaatar|Asia
Morocco|Rabat|Africa
Mozambique|Maputo|Africa
Namibia|Windhoek|Africa
Nepal|Kathmandu|Asia
New Zealand|Wellington|Oceania
Nicaragua|Managua|North America
Niger|Niamey|Africa
Nigeria|Abuja|Africa
North Korea|Pyongyang|Asia
Norway|Oslo|Europe
Oman|Muscat|Asia
Pakistan|Islamabad|Asia
Panama|Panama City|North America
Paraguay|Asuncion|South America
Peru|Lima|South America
Poland|Warsaw|Europe
Portugal|Lisbon|Europe
Qatar|Doha|Asia
Romania|Bucharest|Europe
Russia|Moscow|Europe
Rwanda|Kigali|Africa
Saudi Arabia|Riyadh|Asia
Senegal|Dakar|Africa
Serbia|Belgrade|Europe
Slovakia|Bratislava|Europe
Slovenia|Ljubljana|Europe
Somalia|Mogadishu|Africa
South Korea|Seoul|Asia
Spain|Madrid|Europe
Sudan|Khartoum|Africa
Sweden|Stockholm|Europe
Switzerland|Bern|Europe
Syria|Damascus|Asia
Thailand|Bangkok|Asia
Tunisia|Tunis|Africa
Turkey|Ankara|Asia
Uganda|Kampala|Africa
Ukraine|Kyiv|Europe
Uruguay|Montevideo|South America
Venezuela|Caracas|South America
Vietnam|Hanoi|Asia
Zambia|Lusaka|Africa
Zimbabwe|Harare|Africa
the Netherlands|Amsterdam|Europe
the Philippines|Manila|Asia
the United Kingdom|London|Europe
the United States|Washington|North America
"""

# element | symbol | atomic number
_ELEMENTS = """
hydrogen|H|1
helium|He|2
lithium|Li|3
beryllium|Be|4
boron|B|5
carbon|C|6
nitrogen|N|7
oxygen|O|8
fluorine|F|9
neon|Ne|10
sodium|Na|11
magnesium|Mg|12
aluminium|Al|13
silicon|Si|14
phosphorus|P|15
sulfur|S|16
chlorine|Cl|17
argon|Ar|18
potassium|K|19
calcium|Ca|20
scandium|Sc|21
titanium|Ti|22
vanadium|V|23
chromium|Cr|24
manganese|Mn|25
iron|Fe|26
cobalt|Co|27
nickel|Ni|28
copper|Cu|29
zinc|Zn|30
gallium|Ga|31
germanium|Ge|32
arsenic|As|33
selenium|Se|34
bromine|Br|35
krypton|Kr|36
rubidium|Rb|37
strontium|Sr|38
yttrium|Y|39
zirconium|Zr|40
niobium|Nb|41
molybdenum|Mo|42
ruthenium|Ru|44
rhodium|Rh|45
palladium|Pd|46
silver|Ag|47
cadmium|Cd|48
indium|In|49
tin|Sn|50
antimony|Sb|51
iodine|I|53
xenon|Xe|54
cesium|Cs|55
barium|Ba|56
tungsten|W|74
platinum|Pt|78
gold|Au|79
mercury|Hg|80
lead|Pb|82
bismuth|Bi|83
radium|Ra|88
thorium|Th|90
uranium|U|92
plutonium|Pu|94
"""

# thing, with its article | verb | colour
_COLOURS = """
the sky|is|blue
grass|is|green
snow|is|white
coal|is|black
milk|is|white
blood|is|red
the sea|is|blue
the sun|is|yellow
the moon|is|white
chocolate|is|brown
a banana|is|yellow
a lemon|is|yellow
a strawberry|is|red
a cherry|is|red
a tomato|is|red
a carrot|is|orange
a pumpkin|is|orange
an orange|is|orange
a cucumber|is|green
spinach|is|green
a lime|is|green
a frog|is|green
a crow|is|black
a swan|is|white
a flamingo|is|pink
a pig|is|pink
a canary|is|yellow
an elephant|is|gray
a mouse|is|gray
a polar bear|is|white
an aubergine|is|purple
a plum|is|purple
lavender|is|purple
a blueberry|is|blue
a sapphire|is|blue
an emerald|is|green
a ruby|is|red
mud|is|brown
coffee|is|brown
cotton|is|white
rice|is|white
a fire engine|is|red
"""

_OPPOSITES = """
hot|cold
big|small
tall|short
fast|slow
old|new
happy|sad
light|dark
good|bad
rich|poor
full|empty
wet|dry
hard|soft
loud|quiet
clean|dirty
early|late
strong|weak
open|closed
near|far
high|low
thick|thin
wide|narrow
deep|shallow
sharp|blunt
smooth|rough
sweet|bitter
brave|cowardly
kind|cruel
cheap|expensive
safe|dangerous
simple|complex
easy|difficult
first|last
left|right
up|down
in|out
inside|outside
above|below
before|after
always|never
day|night
summer|winter
north|south
east|west
love|hate
war|peace
friend|enemy
begin|end
win|lose
buy|sell
push|pull
give|take
laugh|cry
ask|answer
float|sink
arrive|depart
accept|refuse
remember|forget
true|false
ancient|modern
"""

_PLURALS = """
mouse|mice
child|children
foot|feet
tooth|teeth
goose|geese
man|men
woman|women
person|people
ox|oxen
leaf|leaves
wolf|wolves
knife|knives
life|lives
wife|wives
half|halves
shelf|shelves
loaf|loaves
cat|cats
dog|dogs
house|houses
box|boxes
bus|buses
church|churches
city|cities
baby|babies
fly|flies
tomato|tomatoes
potato|potatoes
hero|heroes
sheep|sheep
fish|fish
deer|deer
"""

# animal | sound | young
_ANIMALS = """
a cow|moo|a calf
a dog|woof|a puppy
a cat|meow|a kitten
a sheep|baa|a lamb
a duck|quack|a duckling
a pig|oink|a piglet
a horse|neigh|a foal
a lion|roar|a cub
a frog|ribbit|a tadpole
an owl|hoot|an owlet
a chicken|cluck|a chick
a goat|bleat|a kid
a goose|honk|a gosling
"""

# shape | number of sides
_SHAPES = """
triangle|three
square|four
rectangle|four
pentagon|five
hexagon|six
heptagon|seven
octagon|eight
nonagon|nine
decagon|ten
"""


def _rows(text: str, *columns: str) -> tuple[dict[str, str], ...]:
    return tuple(dict(zip(columns, line.split("|"), strict=True)) for line in text.strip().splitlines())


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COUNTRIES = _rows(_COUNTRIES, "country", "capital", "continent")
ELEMENTS = _rows(_ELEMENTS, "element", "symbol", "number")
COLOURED_THINGS = _rows(_COLOURS, "thing", "verb", "colour")
OPPOSITES = _rows(_OPPOSITES, "word", "opposite")
PLURALS = _rows(_PLURALS, "singular", "plural")
ANIMALS = _rows(_ANIMALS, "animal", "sound", "young")
SHAPES = _rows(_SHAPES, "shape", "sides")

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth",
    "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
)  # fmt: skip

# What is asked for -> the list, in its order.
LISTS = {
    "the days of the week": DAYS,
    "the months of the year": MONTHS,
    "the planets": PLANETS,
    "the four seasons": ("spring", "summer", "autumn", "winter"),
    "the colours of the rainbow": ("red", "orange", "yellow", "green", "blue", "indigo", "violet"),
    "the continents": ("Africa", "Antarctica", "Asia", "Europe", "North America", "Oceania", "South America"),
    "the vowels": tuple("aeiou"),
    "the letters of the alphabet": tuple("abcdefghijklmnopqrstuvwxyz"),
    "the four compass points": ("north", "east", "south", "west"),
    "the five senses": ("sight", "hearing", "smell", "taste", "touch"),
    "the primary colours": ("red", "yellow", "blue"),
    "the even numbers up to 10": ("2", "4", "6", "8", "10"),
    "the odd numbers up to 10": ("1", "3", "5", "7", "9"),
    "the even numbers up to 20": ("2", "4", "6", "8", "10", "12", "14", "16", "18", "20"),
    "the prime numbers up to 20": ("2", "3", "5", "7", "11", "13", "17", "19"),
}

NAMES = _words("""
    Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina Victor Wendy
    Adam Bella Carl Diana Eric Fiona George Helen Ivan Julia Kevin Laura Martin Nina Oscar Petra Robert Sara Tom
    Uma Vera Walter Xenia Yusuf Zoe Amir Chen Deepa Emeka Farah Hana Kenji Lena Mei Omar Priya Raj Sofia Yara
""")
PLAIN_COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "black", "white", "gray")
FRUITS = ("apple", "pear", "banana", "cherry", "plum", "lemon", "peach", "grape", "mango", "fig")
JOBS = ("teacher", "doctor", "baker", "farmer", "pilot", "nurse", "painter", "cook", "singer", "engineer")
PETS = ("cat", "dog", "rabbit", "parrot", "hamster", "turtle", "goldfish", "horse", "canary", "lizard")
COMMON_WORDS = _words("""
    apple river stone cloud window garden paper bridge candle mirror forest silver button ladder pencil rocket
    winter basket hammer island jacket kettle lantern market needle ocean pepper quilt ribbon saddle table umbrella
    valley wagon yellow zebra anchor bottle castle dragon engine feather guitar harbor ink jungle king lemon mountain
    night orange planet queen road summer tower village water bread chair door egg flag glass hat
""")

SYLLABLES = _words("bra cor dul fen gor hax jil kra lom mip nov pel quo ris sto tur vex wun yam zor thi ble sha gru")
